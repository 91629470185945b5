"""The cases on which prefill attention is tested and timed."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant
from kiln.jit_kernels.ops.attention.cases import Ragged, lengths_of, make_case
from kiln.jit_kernels.ops.attention.variants import pool_dtype
from kiln.jit_kernels.ops.attention_prefill.reference import plan_reference
from kiln.jit_kernels.ops.attention_prefill.tiles import most_tiles

_CAP = 3
_BATCHES: Sequence[Ragged] = (
    [(20, 20), (3, 1)],
    [],
    [(70, 40), (0, 17), (19, 16), (33, 33)],
    [(200, 34), (1, 1), (17, 17)],
    [(9, 18), (600, 20)],
    [(3000, 700), *((37 * i % 301, 7 * i % 67) for i in range(40)), (520, 520)],  # for the plan
    [(200, 34), (330, 70)],
)
SIZES: list[dict[str, int]] = [
    {"batch": 0, "kv_heads": 2, "group": 3},
    {"batch": 1, "kv_heads": 1, "group": 1},
    {"batch": 2, "kv_heads": 1, "group": 4, "by_token": 1, "less": 16},
    {"batch": 3, "kv_heads": 1, "group": 3, "window": 50, "sinks": 1, "less": 48},
    {"batch": 2, "kv_heads": 1, "group": 2, "window": -21},
    {"batch": 6, "kv_heads": 1, "group": 2, "window": -180, "sinks": 1},
    {"batch": 4, "kv_heads": 1, "group": 2, "sinks": 1},
    {"batch": 6, "kv_heads": 1, "group": 2, "sharp": 5, "window": 50},
    {"batch": 0, "kv_heads": 1, "group": 2, "far": 1},
]
PLAN_SIZES = [*SIZES, *({"batch": 5, "group": 5, "window": window} for window in (0, 100, -100))]
# With this large scale, a row's largest logit is in the second tile of keys.
WGMMA_SIZES = [*SIZES, {"batch": 6, "kv_heads": 1, "group": 2, "sharp": 20}]
BENCH_SIZES: list[dict[str, int]] = [
    {"requests": requests, "context": context, "tokens": tokens, "kv_heads": 8, "group": 4}
    for requests, context, tokens in [
        (1, 1024, 1024),
        (8, 1024, 1024),
        (1, 8192, 8192),
        (1, 10240, 2048),
        (1, 32768, 32768),
        (16, 2048, 64),
    ]
]


def ragged(sizes: Sizes) -> Ragged:
    """Return the requests of a case as (keys, query tokens)."""
    if "batch" in sizes:
        return _BATCHES[sizes["batch"]]
    return [(sizes["context"], sizes["tokens"])] * sizes["requests"]


def head_dim(variant: Variant, sizes: Sizes) -> int:
    """Return the head_dim of a case."""
    return int(variant["head_tile"]) - sizes.get("less", 0)


def plan_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return an empty table of tiles and the lengths of a case."""
    requests, group = ragged(sizes), sizes["group"]
    lengths, starts = lengths_of(requests, device)
    room = most_tiles(len(requests), sum(count for _, count in requests), group)
    items = torch.zeros(1 + room, 4, dtype=torch.int32, device=device)
    step = {"items": items, "seq_lens": lengths, "cu_seqlens_q": starts}
    return {**step, "group": group, "window": sizes.get("window", 0)}


def prefill_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return a random call and its plan, made by the reference."""
    dtype, dim = DTYPES[variant["scalar_t"]], head_dim(variant, sizes)
    sizes = {**sizes, "cap": _CAP if variant["soft_cap"] == "true" else 0}
    case = make_case(sizes, dtype, pool_dtype(variant), dim, device, requests=ragged(sizes))
    plan = SimpleNamespace(**plan_inputs(variant, sizes, device))
    return {
        **vars(case),
        "out": torch.zeros(case.query.shape, dtype=dtype, device=device),
        "lse": torch.zeros(case.query.shape[:2], device=device),
        "items": plan_reference(plan)["items"],
        "counter": torch.zeros(1, dtype=torch.int32, device=device),
        "scale": case.scale * sizes.get("sharp", 1),
    }
