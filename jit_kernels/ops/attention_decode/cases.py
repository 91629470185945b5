"""The cases on which decode attention is tested and timed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.attention.cases import Ragged, lengths_of, make_case, random_table
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK, pool_dtype
from kiln.jit_kernels.ops.attention_decode.reference import plan_reference, shared_reference
from kiln.jit_kernels.ops.attention_decode.splits import (
    ITEM_INTS,
    SCALE_ROOM,
    Shape,
    SplitRule,
    most_items,
    most_rows,
)
from kiln.jit_kernels.ops.attention_decode.workspace import make_mail

_BATCHES: Sequence[Ragged] = (
    [(0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (33, 1)],
    [],
    [(255, 1), (256, 1), (0, 1), (257, 1)],
    [(2, 3), (9, 0), (17, 3), (40, 17), (0, 0), (120, 16), (5, 1)],
    [(20, 1), (777, 1)],
    [(295, 9)],
    [(1030, 1), (1040, 1), (1050, 1), (1008, 1)],
    [
        *((517, 1), (540, 1), (525, 1), (0, 1), (530, 1), (535, 1), (300, 1), (529, 1)),
        *((533, 2), (531, 1), (526, 1), (527, 2)),
    ],
)
SIZES: list[dict[str, int]] = [
    {"batch": 0, "kv_heads": 2, "group": 4, "most": 6, "split": 16},
    {"batch": 1, "kv_heads": 1, "group": 1, "most": 6, "split": 16},
    {"batch": 2, "kv_heads": 1, "group": 3, "most": 3, "split": 2, "by_token": 1, "less": 16},
    {"batch": 3, "kv_heads": 1, "group": 8, "most": 33, "split": 2, "cap": 3, "sinks": 1},
    {"batch": 0, "kv_heads": 1, "group": 2, "most": 6, "split": 2, "sinks": 1, "less": 48},
    {"batch": 3, "kv_heads": 1, "group": 16, "most": 33, "split": 1, "few": 2, "window": 20},
    {"batch": 3, "kv_heads": 1, "group": 2, "most": 33, "split": 2, "window": -7},
    {"batch": 3, "kv_heads": 1, "group": 3, "most": 33, "split": 1, "window": -110, "sinks": 1},
    {"batch": 4, "kv_heads": 1, "group": 2, "most": 8, "split": 2, "window": -500},
    {"batch": 4, "kv_heads": 2, "group": 1, "most": 40, "split": 1, "sinks": 1},
    {"batch": 4, "kv_heads": 1, "group": 4, "most": 2, "split": 64, "steep": 8},
    {"batch": 4, "kv_heads": 1, "group": 4, "most": 4, "split": 64, "steep": 8},
    {"batch": 4, "kv_heads": 1, "group": 4, "most": 6, "split": 64, "steep": 8},
    {"batch": 0, "kv_heads": 1, "group": 2, "most": 6, "split": 2, "far": 1},
    {"batch": 6, "kv_heads": 1, "group": 4, "most": 2, "split": 32, "shared": 600, "steep": 8},
    {"batch": 7, "kv_heads": 2, "group": 3, "most": 8, "split": 8, "few": 2, "shared": 300},
    {"batch": 7, "kv_heads": 1, "group": 2, "most": 8, "split": 8, "few": 4, "shared": 700,
     "sinks": 1, "cap": 3},
]  # fmt: skip
_LLAMA = {"kv_heads": 8, "group": 4, "most": 32, "split": 32, "few": 2}
_SHORT = [(1, 128), (1, 1024), (8, 1024), (64, 1024)]
_LONG = [(2, 8192), (4, 8192), (8, 8192), (64, 8192), (2, 16384), (1, 32768)]
BENCH_SIZES: list[dict[str, int]] = [
    {**_LLAMA, "requests": requests, "context": context} for requests, context in _SHORT + _LONG
]
BENCH_SIZES.append({**BENCH_SIZES[0], "requests": 63, "context": 1024, "long": 131072})
BENCH_SIZES += [
    {**BENCH_SIZES[0], "requests": 64, "context": 2148, "shared": shared} for shared in (0, 2048)
]


def ragged(sizes: Sizes) -> Ragged:
    """Return a case's requests: one of _BATCHES, or equally long ones and perhaps one long one."""
    if "batch" in sizes:
        return _BATCHES[sizes["batch"]]
    one_long = [(sizes["long"], 1)] if "long" in sizes else []
    return one_long + [(sizes["context"], 1)] * sizes["requests"]


_LONG_PREFIX = {**SIZES[0], "context": 2600, "shared": 2500}
_LONG_PREFIX.pop("batch")
SHARED_SIZES = [{**sizes, "requests": len(ragged(sizes))} for sizes in SIZES]
SHARED_SIZES.append({**_LONG_PREFIX, "requests": 3})
PLAN_SIZES = [{**sizes, "requests": len(ragged(sizes))} for sizes in SIZES]


def shape_of(variant: Variant) -> Shape:
    """Return the shape that determines a variant's shared memory."""
    return Shape(int(variant["head_tile"]), pool_dtype(variant).itemsize)


def room(sizes: Sizes) -> tuple[int, int]:
    """Return the maximum number of work items and of partial rows of a case."""
    requests = ragged(sizes)
    tokens = sum(count for _, count in requests)
    blocks = max((-(-length // KV_BLOCK) for length, _ in requests), default=0)
    shapes = (len(requests), tokens, blocks, sizes["group"])
    return most_items(_rule(sizes), *shapes), most_rows(_rule(sizes), *shapes)


def _rule(sizes: Sizes) -> SplitRule:
    return SplitRule(
        most=sizes["most"],
        blocks=sizes["split"],
        few=sizes.get("few", sizes["most"]),
        longer=sizes.get("longer", 4),
        warp_bits=sizes.get("warp_bits", 2),
    )


def plan_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return an empty table of items and the requests of a case."""
    requests = ragged(sizes)
    lengths, starts = lengths_of(requests, device)
    counts = [-(-length // KV_BLOCK) for length, _ in requests]
    table, _ = random_table(counts, sizes.get("shared", 0) // KV_BLOCK)
    step = {"block_table": table.to(device), "seq_lens": lengths, "cu_seqlens_q": starts}
    return step | {"shared": _shared(table, lengths)} | _plan_rest(sizes, device)


def shared_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the requests of a case."""
    plan = plan_inputs(variant, sizes, device)
    shared = torch.zeros_like(plan["seq_lens"])
    return {"shared": shared, **{name: plan[name] for name in ("block_table", "seq_lens")}}


def _shared(table: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return how many first blocks each request has in common with the one before it."""
    step = SimpleNamespace(block_table=table, seq_lens=lengths, shared=lengths)
    return shared_reference(step)["shared"]


def _plan_rest(sizes: Sizes, device: str) -> dict[str, Any]:
    """Return the arguments of the plan other than the requests."""
    items = torch.zeros(1 + room(sizes)[0], ITEM_INTS, dtype=torch.int32, device=device)
    numbers = {"group": sizes["group"], "window": sizes.get("window", 0)}
    return {"items": items, **numbers, **_rule(sizes).arguments()}


def decode_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return a random call and its plan, made by the reference."""
    shape, dtype = shape_of(variant), DTYPES[variant["scalar_t"]]
    sizes = {**sizes, "warp_bits": shape.warp_bits}
    head_dim, requests = shape.head_tile - sizes.get("less", 0), ragged(sizes)
    case = make_case(sizes, dtype, pool_dtype(variant), head_dim, device, requests=requests)
    shared = _shared(case.block_table, case.seq_lens)
    plan = SimpleNamespace(**(vars(case) | _plan_rest(sizes, device)), shared=shared)
    items, rows, kv_heads = plan_reference(plan)["items"], max(1, room(sizes)[1]), sizes["kv_heads"]
    floats = (kv_heads, head_dim + SCALE_ROOM)
    return {
        **vars(case),
        "out": torch.zeros(case.query.shape, dtype=dtype, device=device),
        "lse": torch.zeros(case.query.shape[:2], device=device),
        "items": items,
        "partials": torch.zeros(rows, *floats, device=device),
        "mail": make_mail(_rule(sizes), rows, *floats, device),
        "arrivals": torch.zeros(rows, kv_heads, shape.warps, dtype=torch.int32, device=device),
    }
