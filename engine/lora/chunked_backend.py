"""The projections' parts by chunks: tokens sorted by adapter, in a table made on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kiln.engine.errors import ConfigError
from kiln.engine.lora.backend import Layer
from kiln.engine.lora.batch_info import NO_ADAPTER, LoRABatchInfo
from kiln.engine.lora.kernel_backend import KernelLoRA, slots_of_tokens
from kiln.engine.lora.pool import AdapterPool
from kiln.engine.lora.sites import Site
from kiln.jit_kernels.ops.lora.spec import LORA_SHRINK_EMBEDDING
from kiln.jit_kernels.ops.lora_chunked.chunks import chunk_size
from kiln.jit_kernels.ops.lora_chunked.functions import (
    ChunkTable,
    lora_chunked_expand,
    lora_chunked_shrink,
    make_chunks,
)
from kiln.jit_kernels.ops.lora_chunked.spec import LORA_CHUNKED_EXPAND, LORA_CHUNKED_SHRINK
from kiln.jit_kernels.ops.moe.spec import ALIGN_TOKENS

_MOST_SLOTS = 512  # that align_tokens can tell apart


class ChunkedLoRA(KernelLoRA):
    """Runs the operators of the family ``lora_chunked``; for the embedding's A, that of ``lora``.

    The first layer of a step that has an adapter makes the step's chunk table from the adapter
    slots of its tokens, and the layers behind it use it; in a CUDA graph this is part of the graph.
    So is a table of the rows that the LM head sees. The adapter slots keep their addresses.
    Raises ConfigError if there are more than 512 of them.
    """

    name = "csgmv"
    kernels = frozenset(
        (ALIGN_TOKENS, LORA_CHUNKED_SHRINK, LORA_CHUNKED_EXPAND, LORA_SHRINK_EMBEDDING)
    )

    def __init__(
        self, pool: AdapterPool, sites: Sequence[Site], max_tokens: int, *, overlap: bool = True
    ) -> None:
        super().__init__(pool, sites, max_tokens, overlap=overlap)
        slots, device = self._num_slots, pool.values.device
        if slots > _MOST_SLOTS:
            raise ConfigError(
                f"KILN_LORA_BACKEND=csgmv: {slots} adapters at once (--max-loras); it serves at "
                f"most {_MOST_SLOTS}: lower --max-loras or use KILN_LORA_BACKEND=jit"
            )
        # For all tokens of a step, and for those that the LM head sees: adapter slots, and chunks.
        self._token_slots = torch.full(
            (2, max_tokens), NO_ADAPTER, dtype=torch.int32, device=device
        )
        self._memory = [ChunkTable.holding(max_tokens, slots, device) for _ in range(2)]
        self._made: list[tuple[LoRABatchInfo, ChunkTable] | None] = [None, None]

    def clear_batches(self) -> None:
        """Let fixed batches of every size be padding, until ``fill_batch``."""
        super().clear_batches()
        self._token_slots.fill_(NO_ADAPTER)

    def fill_batch(
        self,
        info: LoRABatchInfo,
        slots: Sequence[int],
        lengths: Sequence[int],
        samples: Sequence[int],
    ) -> None:
        """Set the adapters of a fixed batch, as in ``prepare_lora_batch``; the rest is padding."""
        super().fill_batch(info, slots, lengths, samples)
        own = slots_of_tokens(slots, lengths, samples)
        for place, of_tokens in zip((info, self.pruned_batch_info(info)), own, strict=True):
            size, pinned = place.num_tokens, self._token_slots.is_cuda
            host = torch.full((size,), NO_ADAPTER, dtype=torch.int32, pin_memory=pinned)
            host.numpy()[: len(of_tokens)] = of_tokens
            self._slots_of(place).copy_(host, non_blocking=True)

    def run_linear(
        self, base: Layer, x: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Do the same; the chunk table is made ahead of the branch that A can run in.

        B reads the table too, and so does every later layer, from the stream of the layers.
        """
        if self._widths[site]:
            self._chunks_of(info)
        super().run_linear(base, x, site, out, info)

    def run_lora_a_sgemm(self, x: torch.Tensor, site: Site, info: LoRABatchInfo) -> torch.Tensor:
        """Return h = A x of all parts of a projection; x: [num_tokens, input_size]."""
        h = self._empty(x, site, info)
        if h.shape[1]:
            lora_chunked_shrink(x, self._of_site[site], self._chunks_of(info), h)
        return h

    def run_lora_b_sgemm(
        self, h: torch.Tensor, site: Site, out: torch.Tensor, info: LoRABatchInfo
    ) -> None:
        """Add scale * B h of each part to its columns of out [num_tokens, output size]."""
        if h.shape[1]:
            table, ends = self._chunks_of(info), self._part_ends[site]
            lora_chunked_expand(h, self._of_site[site], table, ends, out)

    def _chunks_of(self, info: LoRABatchInfo) -> ChunkTable:
        """Return the chunks of a step's tokens, which the first call of a step makes."""
        place = _place(info)
        made = self._made[place]
        if made is not None and made[0] is info:
            return made[1]
        chunk = chunk_size(info.num_tokens, self.pool.values.dtype.itemsize)
        table = self._memory[place].of(info.num_tokens, chunk)
        make_chunks(self._slots_of(info), table)
        self._made[place] = (info, table)
        return table

    def _slots_of(self, info: LoRABatchInfo) -> torch.Tensor:
        return self._token_slots[_place(info), : info.num_tokens]


def _place(info: LoRABatchInfo) -> int:
    """Return 0 for a batch of all tokens of a step, 1 for those that the LM head sees."""
    return int(info.pruned is None)
