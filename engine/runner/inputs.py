"""The input tensors of a step, at fixed addresses on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import add

import numpy as np
import torch

from kiln.engine.attention.metadata import AttentionMetadata
from kiln.engine.requests.batch import Batch
from kiln.engine.runner.edits import History
from kiln.engine.runner.rows import Rows, message_room
from kiln.jit_kernels.ops.sampling.functions import Samples
from kiln.jit_kernels.ops.speculative.functions import verify_chain
from kiln.jit_kernels.ops.step.functions import step_inputs
from kiln.jit_kernels.ops.step.message import HEADER

_COUNTED = 32  # requests with penalties whose tokens are counted at once


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
    positions: torch.Tensor  # [num_tokens] int64: rows of the rotary table
    sample_rows: torch.Tensor  # [num_samples] int64: the tokens that need logits
    settings: torch.Tensor  # [num_samples, 6] float32; see sample_tokens
    keys: torch.Tensor  # [num_samples, 4] int64; see sample_tokens
    metadata: AttentionMetadata


class StepInputs:
    """The tensors that every step reads, and the rows that stay from step to step.

    ``max_model_len`` and ``max_tokens`` are in tokens; ``max_drafts``: of a row in one step;
    ``long_start``: where the rotary table of long requests begins, 0 without such a table. On a GPU
    two messages in pinned memory take turns, because the copy of one step may still wait while the
    host writes the next.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        max_tokens: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        device: torch.device,
        max_drafts: int = 0,
        long_start: int = 0,
    ) -> None:
        self.block_size, self.max_tokens = block_size, max_tokens
        self.max_model_len, self._long_start = max_model_len, long_start
        self._rows = Rows(max_requests)
        max_blocks = -(-max_model_len // block_size)
        words = message_room(max_requests, max_tokens, max_blocks)
        max_samples = max_requests * (1 + max_drafts)
        pinned = device.type == "cuda"
        self._host = [torch.zeros(words, dtype=torch.int32, pin_memory=pinned) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._host] if pinned else []
        self._turn = 1

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.message = zeros(words, dtype=torch.int32)
        self._tables = zeros(max_requests, max_blocks, dtype=torch.int32)
        self._token_ids = zeros(max_tokens, dtype=torch.int64)
        self._positions = zeros(max_tokens, dtype=torch.int64)
        self._slot_mapping = zeros(max_tokens, dtype=torch.int64)
        self._cu_seqlens_q = zeros(max_requests + 1, dtype=torch.int32)
        self.seq_lens = zeros(max_requests, dtype=torch.int32)
        self._block_table = zeros(max_requests, max_blocks, dtype=torch.int32)
        self._sample_rows = zeros(max_samples, dtype=torch.int64)
        self._settings = zeros(max_samples, 6, dtype=torch.float32)
        self._keys = zeros(max_samples, 4, dtype=torch.int64)
        # The results of the last step that sampled without log-probabilities; first its tokens.
        self.results = zeros(Samples.size_of(max_samples, 0), dtype=torch.int32)
        self.sampled = self.results[:max_samples]
        # For each row: the drafts of the tokens that follow its last one; how many drafts the
        # lookup found (0: the drafts are fillers); and how many its last step rejected.
        self.drafts = zeros(max_requests, max_drafts, dtype=torch.int32)
        self.draft_counts = zeros(2, max_requests, dtype=torch.int32)
        self.num_drafts, self.rejected = self.draft_counts
        self._count_table = zeros(min(max_requests, _COUNTED), vocab_size, dtype=torch.int32)
        self._token_pool = zeros(0, dtype=torch.int32)

    def use_pool(self, token_ids: torch.Tensor) -> None:
        """Write the steps' tokens to the slots of a KV pool, ``token_ids`` [num_slots] int32."""
        self._token_pool = token_ids

    @property
    def history(self) -> History:
        """The tokens of all requests, those of the last step included."""
        return History(self._token_pool, self._tables, self._count_table, self.block_size)

    def addresses(self) -> tuple[int, ...]:
        """Return the addresses of everything that a step reads or writes here."""
        tensors = (
            self.message, self._tables, self._token_ids, self._positions, self._slot_mapping,
            self._cu_seqlens_q, self.seq_lens, self._block_table, self._sample_rows,
            self._settings, self._keys, self.results, self.drafts, self.draft_counts,
            self._token_pool,
        )  # fmt: skip
        return tuple([tensor.data_ptr() for tensor in tensors])

    def clear(self) -> None:
        """Make all inputs padding, as if of a step without requests."""
        self.message[:HEADER].zero_()
        self.fill(Sizes(self.max_tokens, len(self.seq_lens), len(self._keys)), (), ())

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what a step changes and the next one reads, as copies for ``restore``."""
        return self.sampled.clone(), self.rejected.clone()

    def restore(self, state: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Go back to a state, so that the step behind it can run again."""
        self.sampled.copy_(state[0])
        self.rejected.copy_(state[1])

    def make_stale(self, tokens: int, rows: int, samples: int, block: int) -> None:
        """Fill the inputs of a size with other values, which point to one block."""
        self._token_ids[:tokens].fill_(1)
        self._positions[:tokens].fill_(0)
        self._slot_mapping[:tokens].fill_(block * self.block_size)
        self.seq_lens[:rows].fill_(self.block_size)
        self._cu_seqlens_q[: rows + 1] = torch.arange(rows + 1, device=self.message.device)
        self._block_table[:rows].fill_(block)
        self._sample_rows[:samples].fill_(self.max_tokens - 1)  # of a larger step
        self._settings[:samples].fill_(float("nan"))
        self._keys[:samples].fill_(1)
        self.results.fill_(-1)

    def send(self, batch: Batch) -> np.ndarray:
        """Copy the message of a step to the device, in the order of the current stream.

        Returns the message, [words] int32, valid until the next but one is sent.
        """
        host = self._next_host()
        words = self._rows.write(batch, host.numpy())
        return self._copy(host, words)

    def send_message(self, message: np.ndarray) -> None:
        """Do the same with a message that another rank's ``send`` returned."""
        host = self._next_host()
        host.numpy()[: len(message)] = message
        self._copy(host, len(message))

    def _next_host(self) -> torch.Tensor:
        """Return the host's memory for the next message, which no copy reads any more.

        Steps that sample nothing are not waited for: the host may be several of them ahead.
        """
        self._turn = 1 - self._turn
        if self._copied:
            self._copied[self._turn].synchronize()
        return self._host[self._turn]

    def _copy(self, host: torch.Tensor, words: int) -> np.ndarray:
        self.message[:words].copy_(host[:words], non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        message: np.ndarray = host.numpy()[:words]
        return message

    def sampling(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the settings and keys of the samples of the last step."""
        return self._settings[:samples], self._keys[:samples]

    def lengths(self, samples: int) -> torch.Tensor:
        """Return how many tokens are ahead of each token that the last step samples, int64."""
        ahead = self._positions.index_select(0, self._sample_rows[:samples]) + 1
        if self._long_start:  # at most so many are ahead in a short request
            ahead -= self._long_start * (ahead > self._long_start)
        return ahead

    def verify(self) -> None:
        """Find which drafts of the step are what it has sampled; the next step goes on there."""
        verify_chain(self.rejected, self.message, self._token_ids, self.sampled)

    def make(self, batch: Batch, tokens: int = 0, samples: int = 0) -> ForwardInputs:
        """Return the inputs of the step whose message was sent last.

        They are padded to at least so many tokens and samples; the metadata is not padded.
        """
        of = batch.columns
        query_lens: tuple[int, ...] = of.num_tokens
        used = batch.num_tokens
        sizes = Sizes(max(used, tokens), len(query_lens), max(batch.num_samples, samples))
        kv_lens: tuple[int, ...] = ()  # the device alone knows which drafts were accepted
        if not self.drafts.shape[1]:
            kv_lens = tuple(map(add, of.num_computed_tokens, query_lens))
        inputs = self.fill(sizes, query_lens, kv_lens)
        own = replace(inputs.metadata, slot_mapping=inputs.metadata.slot_mapping[:used])
        return replace(inputs, metadata=own)

    def fill(
        self, sizes: Sizes, query_lens: tuple[int, ...], kv_lens: tuple[int, ...]
    ) -> ForwardInputs:
        """Return inputs of some sizes, which may be larger than the step of the message.

        The rest is padding that changes no KV block. The tuples are those of AttentionMetadata.
        """
        inputs = self.views(sizes, query_lens, kv_lens)
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
            token_pool=self._token_pool,
            message=self.message,
            sampled=self.sampled,
            drafts=self.drafts,
            rejected=self.rejected,
            block_size=self.block_size,
        )
        return inputs

    def views(
        self, sizes: Sizes, query_lens: tuple[int, ...] = (), kv_lens: tuple[int, ...] = ()
    ) -> ForwardInputs:
        """Return the tensors of some sizes with what they hold now; see ``fill``."""
        return ForwardInputs(
            token_ids=self._token_ids[: sizes.tokens],
            positions=self._positions[: sizes.tokens],
            sample_rows=self._sample_rows[: sizes.samples],
            settings=self._settings[: sizes.samples],
            keys=self._keys[: sizes.samples],
            metadata=AttentionMetadata(
                slot_mapping=self._slot_mapping[: sizes.tokens],
                block_table=self._block_table[: sizes.requests],
                cu_seqlens_q=self._cu_seqlens_q[: sizes.requests + 1],
                seq_lens=self.seq_lens[: sizes.requests],
                query_lens=query_lens,
                kv_lens=kv_lens,
                block_size=self.block_size,
            ),
        )
