"""The input tensors of a step, at fixed addresses on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.requests.batch import Batch
from kiln.engine.runner.rows import Rows, message_room
from kiln.jit_kernels.ops.step.functions import step_inputs


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many tokens, requests and samples the tensors of a step have room for."""

    tokens: int
    requests: int
    samples: int


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """The inputs of one forward pass and of its sampling."""

    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    sample_rows: torch.Tensor  # [num_samples] int64: the tokens that need logits
    settings: torch.Tensor  # [num_samples, 6] float32; see sample_tokens
    keys: torch.Tensor  # [num_samples, 4] int64; see sample_tokens
    metadata: AttentionMetadata


class StepInputs:
    """The tensors that every step reads, and the rows that stay from step to step.

    ``max_model_len`` and ``max_tokens`` are in tokens. On a GPU two messages in pinned memory take
    turns, because the copy of one step may still wait while the host writes the next.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self._rows = Rows(max_requests)
        max_blocks = -(-max_model_len // block_size)
        words = message_room(max_requests, max_tokens, max_blocks, block_size)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._turn = 0

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._message = zeros(words, dtype=torch.int32)
        self._tables = zeros(max_requests, max_blocks, dtype=torch.int32)
        self._token_ids = zeros(max_tokens, dtype=torch.int64)
        self._positions = zeros(max_tokens, dtype=torch.int64)
        self._slot_mapping = zeros(max_tokens, dtype=torch.int64)
        self._cu_seqlens_q = zeros(max_requests + 1, dtype=torch.int32)
        self._seq_lens = zeros(max_requests, dtype=torch.int32)
        self._block_table = zeros(max_requests, max_blocks, dtype=torch.int32)
        self._sample_rows = zeros(max_requests, dtype=torch.int64)
        self._settings = zeros(max_requests, 6, dtype=torch.float32)
        self._keys = zeros(max_requests, 4, dtype=torch.int64)
        self.sampled = zeros(max_requests, dtype=torch.int32)  # the tokens of the last step

    def send(self, batch: Batch) -> None:
        """Copy the message of a step to the device, in the order of the current stream."""
        host, self._turn = self._host[self._turn], 1 - self._turn
        words = self._rows.write(batch, host.numpy())
        self._message[:words].copy_(host[:words], non_blocking=True)

    def make(self, batch: Batch) -> ForwardInputs:
        """Return the inputs of the step whose message was sent last."""
        rows = batch.requests
        query_lens = tuple(row.num_tokens for row in rows)
        kv_lens = tuple(row.num_computed_tokens + row.num_tokens for row in rows)
        samples = sum(row.samples for row in rows)
        sizes = Sizes(sum(query_lens), len(query_lens), samples)
        return self.fill(sizes, query_lens, kv_lens)

    def fill(
        self, sizes: Sizes, query_lens: tuple[int, ...], kv_lens: tuple[int, ...]
    ) -> ForwardInputs:
        """Return inputs of some sizes, which may be larger than the step of the message.

        The rest is padding that changes no KV block. The tuples are those of AttentionMetadata.
        """
        inputs = ForwardInputs(
            token_ids=self._token_ids[: sizes.tokens],
            positions=self._positions[: sizes.tokens],
            sample_rows=self._sample_rows[: sizes.samples],
            settings=self._settings[: sizes.samples],
            keys=self._keys[: sizes.samples],
            metadata=AttentionMetadata(
                slot_mapping=self._slot_mapping[: sizes.tokens],
                block_table=self._block_table[: sizes.requests],
                cu_seqlens_q=self._cu_seqlens_q[: sizes.requests + 1],
                seq_lens=self._seq_lens[: sizes.requests],
                query_lens=query_lens,
                kv_lens=kv_lens,
                block_size=self.block_size,
            ),
        )
        metadata = inputs.metadata
        step_inputs(
            token_ids=inputs.token_ids,
            positions=inputs.positions,
            slot_mapping=metadata.slot_mapping,
            cu_seqlens_q=metadata.cu_seqlens_q,
            seq_lens=metadata.seq_lens,
            sample_rows=inputs.sample_rows,
            settings=inputs.settings,
            keys=inputs.keys,
            block_table=metadata.block_table,
            tables=self._tables,
            message=self._message,
            sampled=self.sampled,
            block_size=self.block_size,
        )
        return inputs
