"""The cases on which the chunked LoRA kernels are tested and timed: those of the family ``lora``.

"slots" is the number of adapter slots. "lift" is the power of two by which h of the expand is
larger than usual, and the scales smaller.
"""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import Sizes, Variant
from kiln.jit_kernels.ops.lora import cases as lora_cases
from kiln.jit_kernels.ops.lora_chunked.chunks import num_chunks
from kiln.jit_kernels.ops.moe.reference import align_reference
from kiln.jit_kernels.ops.moe.spec import ALIGN_TOKENS


def _with_slots(sizes: Sizes, **more: int) -> Sizes:
    return {**sizes, "slots": lora_cases.slots_of(sizes), **more}


_UNEVEN = {"tokens": 9, "ranks": lora_cases.UNEVEN, "gap": 0}
SHRINK_SIZES = [_with_slots(sizes) for sizes in lora_cases.SHRINK_SIZES]
SHRINK_SIZES += [_with_slots({"input_size": 40, "width": 114, **_UNEVEN})]
EXPAND_SIZES = [_with_slots(sizes, lift=0) for sizes in lora_cases.EXPAND_SIZES]
EXPAND_SIZES += [{**EXPAND_SIZES[3], "lift": lift} for lift in (20, -20)]
EXPAND_SIZES += [
    {**EXPAND_SIZES[5], "gap": 3},  # rows are aligned, and no part is filled by vectors
    _with_slots({"outputs": 48, "parts": 2, **_UNEVEN}, lift=0),
]
SHRINK_BENCH_SIZES = [_with_slots(sizes) for sizes in lora_cases.SHRINK_BENCH_SIZES]
EXPAND_BENCH_SIZES = [_with_slots(sizes, lift=0) for sizes in lora_cases.EXPAND_BENCH_SIZES]


def shrink_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return chunks of several adapters, some tokens without one; A lies between NaNs."""
    return _by_chunks(lora_cases.shrink_inputs(variant, sizes, device), variant, sizes)


def expand_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return chunks of several adapters, some tokens without one; B lies between NaNs."""
    made = lora_cases.expand_inputs(variant, {**sizes, "lift": 0}, device)
    made["h"] *= 2.0 ** sizes["lift"]
    made["scale_table"] *= 2.0 ** -sizes["lift"]
    return _by_chunks(made, variant, sizes)


def _by_chunks(made: dict[str, Any], variant: Variant, sizes: Sizes) -> dict[str, Any]:
    """Return the inputs with a chunk table in the place of the tiles."""
    of_tiles = ("tile_slots", "tile_tokens", "partials", "arrivals")
    own = {name: value for name, value in made.items() if name not in of_tiles}
    slots = torch.tensor(lora_cases.token_slots(sizes), dtype=torch.int32)
    table = chunks_of(slots.to(own["h"].device), sizes["slots"], int(variant["chunk"]))
    return {**own, "sorted_token_ids": table[0], "chunk_slots": table[1]}


def chunks_of(
    token_slots: torch.Tensor, num_slots: int, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sorted_token_ids and chunk_slots for [num_tokens] adapter slots, -1 for none."""
    count, ids = num_chunks(len(token_slots), num_slots, chunk), token_slots[:, None]
    outputs = [ids.new_empty(size) for size in (count * chunk, count, 1, num_slots)]
    made = align_reference(ALIGN_TOKENS.parameters.Arguments(*outputs, ids, chunk))
    return made["sorted_token_ids"], made["expert_ids"]
