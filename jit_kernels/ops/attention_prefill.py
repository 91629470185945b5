"""Paged attention for prompts: a plan once a step, a kernel a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from kiln.jit_kernels.attention.cases import make_case
from kiln.jit_kernels.attention.checks import check_attention, has_aligned_rows
from kiln.jit_kernels.attention.error import MOST_UNITS, attention_error
from kiln.jit_kernels.attention.reference import Paged, attend, scattered
from kiln.jit_kernels.attention.splits import HEAD_TILES, comes, head_tile
from kiln.jit_kernels.attention.tiles import (
    TILE_KEYS,
    TILE_ROWS,
    PrefillWorkspace,
    Tiles,
    make_prefill_workspace,
    most_tiles,
    ordered_tiles,
    serves,
)
from kiln.jit_kernels.shapes import takes_arrays
from kiln.jit_kernels.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.torch_ops import call, define

_SAME, _E4M3 = "SCALAR_T", "kiln::e4m3"  # what the pool holds
_PLAN_THREADS = 512
_CAP = 3  # of tests
_PAGED = (*range(2, 8), 9, *range(11, 16))  # of the operator's arguments, those of Paged
_WGMMA_KEYS = 128  # of a tile
_WIDE = 128  # tile of head_dim up to which two blocks run on a multiprocessor


@takes_arrays
def paged_prefill(  # noqa: PLR0913 (all that attention depends on)
    query: torch.Tensor,
    key_pool: torch.Tensor,
    value_pool: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: PrefillWorkspace | None = None,
) -> torch.Tensor:
    """Return the attention of requests with more than 16 tokens in this step over their paged keys.

    Arguments, results and refusals as of paged_attention, which serves the other requests: their
    rows are left alone. The kernel has a soft_cap for bf16, in the pool too, and a head_dim above
    64; with others a GPU raises NoSuchKernel, and a CPU runs the reference. With ``workspace`` its
    plan for this step (``plan_prefill``) is used, and nothing is allocated but ``out``. Source:
    https://arxiv.org/abs/2307.08691
    """
    out = query.new_empty(query.shape) if out is None else out
    lse = torch.empty(0, device=query.device) if lse is None else lse
    paged = Paged(
        query, key_pool, value_pool, block_table, seq_lens, cu_seqlens_q, sinks, scale, window,
        soft_cap, k_scale, v_scale,
    )  # fmt: skip
    check_attention("paged_prefill", paged, out, lse)
    query = query if has_aligned_rows(query) else query.contiguous()
    group = query.shape[1] // key_pool.shape[1]
    if workspace is None:
        workspace = make_prefill_workspace(
            max_requests=seq_lens.shape[0],
            max_tokens=query.shape[0],
            group=group,
            device=query.device,
            windows=(window,),
        )
        plan_prefill(workspace, seq_lens, cu_seqlens_q, query.shape[0])
    if window not in workspace.items or workspace.group != group:
        raise ValueError(
            f"paged_prefill: window {window} and {group} heads a KV head are not the workspace's: "
            f"{list(workspace.items)} and {workspace.group}"
        )
    call(
        _PREFILL, out, lse, query, key_pool, value_pool, block_table, seq_lens, cu_seqlens_q,
        workspace.items[window], sinks, workspace.counter, scale, window, soft_cap, k_scale,
        v_scale,
    )  # fmt: skip
    return out


def plan_prefill(
    workspace: PrefillWorkspace,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    num_tokens: int,
) -> None:
    """Find the work of a step on the device, for every window of a workspace, in one launch each.

    seq_lens [num_requests], cu_seqlens_q [num_requests + 1]: int32. Raises ValueError, with the
    numbers, when a step of these sizes could need more than the workspace has.
    """
    workspace.check(seq_lens.shape[0], num_tokens)
    for window, items in workspace.items.items():
        call(_PLAN, items, seq_lens, cu_seqlens_q, workspace.group, window)


def _plan_reference(
    out_items: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    group: int,
    window: int,
) -> tuple[torch.Tensor]:
    """Return the table of tiles."""
    starts, lengths = cu_seqlens_q.tolist(), seq_lens.tolist()
    tiles = ordered_tiles(
        [
            Tiles(last - first, length, group, window)
            for first, last, length in zip(starts[:-1], starts[1:], lengths, strict=True)
        ]
    )
    table = out_items.clone()
    rows = [(min(len(tiles), len(table) - 1), 0, 0, 0), *tiles][: len(table)]
    table[: len(rows)] = torch.tensor(rows, dtype=table.dtype, device=table.device)
    return (table,)


def _prefill_reference(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new out and out_lse; how the work is cut up plays no part."""
    return scattered(attend(_paged(arguments), serves), arguments[0], arguments[1])


def _prefill_error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    """Return the error in units of rounding; infinite if the counter is not back at zero."""
    if arguments[10].any():
        return float("inf")
    fp16 = arguments[0].dtype == torch.float16
    return attention_error(
        _paged(arguments), arguments[0], arguments[1], wanted, serves, fp16_weights=fp16
    )


def _paged(arguments: Sequence[Any]) -> Paged:
    """Pick what attention depends on out of the operator's arguments."""
    return Paged(*(arguments[position] for position in _PAGED))


def _plan_bind(
    out_items: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    group: int,
    window: int,
) -> Bound:
    tensors = (out_items, seq_lens, cu_seqlens_q)
    numbers = (seq_lens.shape[0], out_items.shape[0] - 1, group, window)
    return Bound({}, {}, (*tensors, *numbers))


def _prefill_bind(*arguments: Any) -> Bound:
    out, lse, query, key_pool, value_pool, block_table = arguments[:6]
    scale, window, soft_cap, k_scale, v_scale = arguments[11:]
    sinks = 0 if arguments[9] is None else arguments[9]
    values = (
        out, lse, query, key_pool, value_pool, block_table, *arguments[6:9], arguments[10], sinks,
        *query.stride()[:2], *key_pool.stride()[:3], *value_pool.stride()[:3],
        block_table.stride(0), query.shape[1], key_pool.shape[1], query.shape[2], window,
        scale * k_scale, soft_cap, v_scale,
    )  # fmt: skip
    variant = {
        "scalar_t": SCALARS[query.dtype],
        "head_tile": str(head_tile(query.shape[2])),
        "kv_t": _SAME if key_pool.dtype == query.dtype else _E4M3,
        "soft_cap": "true" if soft_cap else "false",
    }
    return Bound(variant, {}, values)


def _comes(variant: Variant) -> bool:
    """Keep the soft cap to the dtype and the head_dims of Gemma."""
    capped = variant["soft_cap"] == "true"
    gemma = {"scalar_t": "kiln::bf16", "kv_t": _SAME}.items() <= variant.items()
    return comes(variant) and (not capped or (gemma and variant["head_tile"] != "64"))


def _plan_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((1, 1, 1), (_PLAN_THREADS, 1, 1))


def _shared_bytes(variant: Variant) -> int:
    """Return the bytes of queries, keys and values; rows are an odd number of 16 bytes apart."""
    tile, fp8 = int(variant["head_tile"]), variant["kv_t"] == _E4M3
    row, narrow = (tile // 8 | 1) * 16, (tile // 16 | 1) * 16
    key_tiles = 1 if fp8 or tile > _WIDE else 2
    shared = TILE_ROWS * row + (key_tiles + 1) * TILE_KEYS * row
    return shared + (2 * TILE_KEYS * narrow if fp8 else 0)


def _prefill_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return as many blocks as run at once; the work is found on the device."""
    shared, wide = _shared_bytes(variant), int(variant["head_tile"]) <= _WIDE
    resident = max(1, min(2 if wide else 1, gpu.max_shared_bytes // (shared + 2048)))
    grid = (gpu.num_multiprocessors * resident, 1, 1)
    return LaunchGeometry(grid, (128 if wide else 256, 1, 1), shared)


def _wgmma_shared_bytes(variant: Variant) -> int:
    """Return the bytes of queries, and of two tiles each of keys and values, at a kilobyte."""
    return 1024 + 2 * int(variant["head_tile"]) * (TILE_ROWS + 4 * _WGMMA_KEYS)


def _wgmma_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry(
        (gpu.num_multiprocessors, 1, 1), (256, 1, 1), _wgmma_shared_bytes(variant)
    )


_BATCHES: Sequence[Sequence[tuple[int, int]]] = (
    [(20, 20), (3, 1)],
    [],
    [(70, 40), (0, 17), (19, 16), (33, 33)],
    [(200, 34), (1, 1), (17, 17)],
    [(9, 18), (600, 20)],
    [(3000, 700), *((37 * i % 301, 7 * i % 67) for i in range(40)), (520, 520)],  # for the plan
    [(200, 34), (330, 70)],
)


def _ragged(sizes: Sizes) -> Sequence[tuple[int, int]]:
    """Return the requests of a case as (keys, query tokens)."""
    if "batch" in sizes:
        return _BATCHES[sizes["batch"]]
    return [(sizes["context"], sizes["tokens"])] * sizes["requests"]


def _head_dim(variant: Variant, sizes: Sizes) -> int:
    return int(variant["head_tile"]) - sizes.get("less", 0)


def _plan_cost(variant: Variant, sizes: Sizes) -> Cost:
    requests = _ragged(sizes)
    tokens = sum(count for _, count in requests)
    tiles = 1 + most_tiles(len(requests), tokens, sizes["group"])
    return Cost(16 * tokens + 16 * tiles + 12 * len(requests) + 4, 16 * len(requests))


def _prefill_cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count the products that causality leaves, and each key and value once a request."""
    dim, size = _head_dim(variant, sizes), DTYPES[variant["scalar_t"]].itemsize
    stored = size if variant["kv_t"] == _SAME else 1
    window, heads = sizes.get("window", 0), sizes["kv_heads"] * sizes["group"]
    moved = pairs = 0
    for keys, tokens in _ragged(sizes):
        limits = [min(limit, window or limit) for limit in range(keys - tokens + 1, keys + 1)]
        pairs += sum(max(limit, 0) for limit in limits)
        seen = min(keys, window + tokens) if window else keys
        moved += 2 * seen * sizes["kv_heads"] * dim * stored + tokens * heads * (2 * dim * size + 4)
    requests = len(_ragged(sizes))
    moved += 8 * requests + 4 + 4 * heads * sizes.get("sinks", 0)
    return Cost(moved + 16 * most_tiles(requests, moved, 1), 4 * pairs * heads * dim)


def _plan_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    requests = _ragged(sizes)
    tokens = [count for _, count in requests]
    room = most_tiles(len(requests), sum(tokens), sizes["group"])
    tensors = (
        torch.zeros(1 + room, 4, dtype=torch.int32),
        torch.tensor([length for length, _ in requests], dtype=torch.int32),
        torch.tensor([0, *tokens]).cumsum(0).to(torch.int32),
    )
    return (*(t.to(device) for t in tensors), sizes["group"], sizes.get("window", 0))


def _prefill_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    dtype, dim = DTYPES[variant["scalar_t"]], _head_dim(variant, sizes)
    sizes = {**sizes, "cap": _CAP if variant["soft_cap"] == "true" else 0}
    kv_dtype = dtype if variant["kv_t"] == _SAME else torch.float8_e4m3fn
    case = make_case(sizes, dtype, kv_dtype, dim, device, requests=_ragged(sizes))
    (items,) = _plan_reference(*_plan_inputs({}, sizes, device))
    return (
        torch.zeros(case.query.shape, dtype=dtype, device=device),
        torch.zeros(case.query.shape[:2], device=device),
        case.query, case.key_pool, case.value_pool, case.block_table, case.seq_lens,
        case.cu_seqlens_q, items, case.sinks, torch.zeros(1, dtype=torch.int32, device=device),
        case.scale * sizes.get("sharp", 1), case.window, case.soft_cap, case.k_scale, case.v_scale,
    )  # fmt: skip


_SIZES: list[dict[str, int]] = [
    {"batch": 0, "kv_heads": 2, "group": 3},
    {"batch": 1, "kv_heads": 1, "group": 1},
    {"batch": 2, "kv_heads": 1, "group": 4, "by_token": 1, "less": 16},
    {"batch": 3, "kv_heads": 1, "group": 3, "window": 50, "sinks": 1, "less": 48},
    {"batch": 4, "kv_heads": 1, "group": 2, "sinks": 1},
    {"batch": 6, "kv_heads": 1, "group": 2, "sharp": 5, "window": 50},
    {"batch": 0, "kv_heads": 1, "group": 2, "far": 1},
]
_BENCH_SIZES: list[dict[str, int]] = [
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

_PLAN = KernelSpec(
    name="prefill_plan",
    source="attention_prefill/prefill_plan.cu",
    entry="prefill_plan",
    schema="(Tensor(a!) out_items, Tensor seq_lens, Tensor cu_seqlens_q, int group, int window) "
    "-> ()",
    arguments=("pointer",) * 3 + ("int32",) * 4,
    params={},
    bind=_plan_bind,
    geometry=_plan_geometry,
    cost=_plan_cost,
    reference=_plan_reference,
    make_inputs=_plan_inputs,
    sizes=[*_SIZES, *({"batch": 5, "group": 5, "window": window} for window in (0, 100))],
    bench_sizes=_BENCH_SIZES,
    tolerance=0.0,
    min_arch=80,
    paper="https://arxiv.org/abs/2307.08691",
)
_PREFILL = KernelSpec(
    name="paged_prefill",
    source="attention_prefill/paged_prefill.cu",
    entry="paged_prefill",
    schema="(Tensor(a!) out, Tensor(b!) out_lse, Tensor query, Tensor key_pool, "
    "Tensor value_pool, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "Tensor item_table, Tensor? sinks, Tensor(c!) workspace_counter, float scale, int window, "
    "float soft_cap, float k_scale, float v_scale) -> ()",
    arguments=("pointer",) * 11 + ("int64",) * 9 + ("int32",) * 4 + ("float",) * 3,
    params={
        "scalar_t": ["kiln::bf16", "kiln::fp16"],
        "head_tile": [str(tile) for tile in HEAD_TILES],
        "kv_t": [_SAME, _E4M3],
        "soft_cap": ["false", "true"],
    },
    bind=_prefill_bind,
    geometry=_prefill_geometry,
    cost=_prefill_cost,
    reference=_prefill_reference,
    make_inputs=_prefill_inputs,
    sizes=_SIZES,
    bench_sizes=_BENCH_SIZES,
    tolerance=MOST_UNITS,
    comes=_comes,
    min_arch=80,
    max_cpu_seconds=1.0,
    shared_bytes=lambda variant, gpu: _shared_bytes(variant),
    error=_prefill_error,
    bench_needs={"scalar_t": "kiln::bf16", "head_tile": "128", "kv_t": _SAME, "soft_cap": "false"},
    paper="https://arxiv.org/abs/2307.08691",
)
_WGMMA = replace(
    _PREFILL,
    name="paged_prefill_wgmma",
    source="attention_prefill/paged_prefill_wgmma.cu",
    entry="paged_prefill_wgmma",
    params={**_PREFILL.params, "head_tile": ["64", "128"], "kv_t": [_SAME], "soft_cap": ["false"]},
    geometry=_wgmma_geometry,
    sizes=[*_SIZES, {"batch": 6, "kv_heads": 1, "group": 2, "sharp": 20}],  # tops rise in tile two
    comes=lambda variant: True,
    instead_of=_PREFILL.name,
    only_arch="sm_90a",
    min_arch=90,
    shared_bytes=lambda variant, gpu: _wgmma_shared_bytes(variant),
)
SPECS = [_PLAN, _PREFILL, _WGMMA]
define(SPECS)
