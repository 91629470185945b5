"""Paged attention for decode and draft verification: a plan once a step, a kernel a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch

from kiln.jit_kernels.attention.cases import make_case, moved_bytes, ragged, random_table
from kiln.jit_kernels.attention.checks import check_attention, has_aligned_rows
from kiln.jit_kernels.attention.error import MOST_UNITS, attention_error
from kiln.jit_kernels.attention.reference import Paged, attend, scattered
from kiln.jit_kernels.attention.splits import (
    FIRST_IDS,
    HEAD_TILES,
    ITEM_INTS,
    KV_BLOCK,
    MOST_TOKENS,
    PAIR_BLOCKS,
    SCALE_ROOM,
    UNSENT,
    Part,
    Shape,
    SplitRule,
    comes,
    cut,
    first_unit,
    halvings,
    head_tile,
    most_items,
    most_rows,
    unit_begin,
)
from kiln.jit_kernels.attention.workspace import Workspace, make_mail, workspace_for
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
_LOG2E = math.log2(math.e)
_PLAN_BLOCKS, _PLAN_THREADS = 2, 128  # blocks a multiprocessor
_INVERSE = 2**20  # i // group is i * (_INVERSE // group + 1) // _INVERSE, for rows of a tile
_PAGED = (*range(2, 8), 9, *range(13, 18))  # where Paged's fields stand in the arguments


@takes_arrays
def paged_attention(  # noqa: PLR0913 (all that attention depends on)
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
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Return the attention of requests with up to 16 tokens in this step over their paged keys.

    query, out: [num_tokens, num_heads, head_dim] bf16, or fp16 with head_dim up to 128; head_dim:
    a multiple of 16 up to 256; key_pool, value_pool: [num_blocks, num_kv_heads, 16, head_dim] of
    that dtype, or of float8_e4m3fn beside bf16 queries of head_dim up to 128, any strides but of
    the last dimension; block_table [num_requests, max_blocks], seq_lens [num_requests],
    cu_seqlens_q [num_requests + 1]: int32; seq_lens counts the step's tokens too. A token sees its
    own key and those before it, the last ``window`` of them (0: all). ``soft_cap`` c makes
    c tanh(x / c) of a logit (0: no cap); sinks [num_heads] float32 are one more logit each, without
    a value; keys count k_scale-fold, values v_scale-fold; scale and k_scale are above 0. lse
    [num_tokens, num_heads] float32, if given, gets the logarithm of the sum of e to the logits.

    Rows of requests with more tokens are left alone; a row without keys is 0, its lse -inf.
    Nothing at or past a request's length is read. What a request has before this step's tokens must
    be in the pools before plan_attention: it may be read while kernels ahead still run. With
    ``workspace`` its plan for this step (``plan_attention``) is used, and nothing is allocated but
    ``out``. Raises ValueError on a wrong shape or number, TypeError on a wrong dtype.
    """
    out = query.new_empty(query.shape) if out is None else out
    lse = torch.empty(0, device=query.device) if lse is None else lse
    paged = Paged(
        query, key_pool, value_pool, block_table, seq_lens, cu_seqlens_q, sinks, scale, window,
        soft_cap, k_scale, v_scale,
    )  # fmt: skip
    check_attention("paged_attention", paged, out, lse)
    query = query if has_aligned_rows(query) else query.contiguous()
    if workspace is None:
        workspace = workspace_for(query, key_pool, block_table, window)
        plan_attention(workspace, block_table, seq_lens, cu_seqlens_q, query.shape[0])
    if window not in workspace.item_tables:
        raise ValueError(
            f"window {window} is not of the workspace's: {list(workspace.item_tables)}"
        )
    call(
        _ATTENTION, out, lse, query, key_pool, value_pool, block_table, seq_lens, cu_seqlens_q,
        workspace.item_tables[window], sinks, workspace.partials, workspace.mail,
        workspace.arrivals, scale, window, soft_cap, k_scale, v_scale,
    )  # fmt: skip
    return out


def plan_attention(
    workspace: Workspace,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    num_tokens: int,
) -> None:
    """Find the work of a step on the device, for every window of a workspace, in one launch each.

    Arguments as of paged_attention. Raises ValueError, with the numbers, when a step of these
    shapes could need more than the workspace has.
    """
    workspace.check(seq_lens.shape[0], num_tokens, block_table.shape[1])
    group, rule = workspace.num_heads // workspace.num_kv_heads, workspace.rule
    for window, items in workspace.item_tables.items():
        call(
            _PLAN, items, block_table, seq_lens, cu_seqlens_q, group, window, rule.most,
            rule.blocks, rule.few, rule.longer, rule.warp_bits,
        )  # fmt: skip


def _plan_reference(  # noqa: PLR0913 (the operator's)
    out_items: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    group: int,
    window: int,
    max_splits: int,
    split_blocks: int,
    few_splits: int,
    longer: int,
    warp_bits: int,
) -> tuple[torch.Tensor]:
    """Return the table of work items: a header, then request by request, tile by tile."""
    rule = SplitRule(max_splits, split_blocks, few_splits, longer, warp_bits)
    items, rows = [], 0
    starts = cu_seqlens_q.tolist()
    requests = [(b - a, n) for (a, b), n in zip(pairwise(starts), seq_lens.tolist(), strict=True)]
    cuts = [cut(rule, tokens, length, group, window) for tokens, length in requests]
    divided = Part(Part.SPLIT_IN_UNITS + halvings(rule, cuts))  # divisible requests
    for request, ((tokens, length), one) in enumerate(zip(requests, cuts, strict=True)):
        kind = divided if one.divisible else Part.SPLIT
        parts = one.num_splits << kind.halvings
        for tile, part in product(range(one.num_tiles), range(parts)):
            split = part >> kind.halvings
            begin, end = one.begin(split), one.begin(split + 1)
            pairs = -(-(end - begin) // PAIR_BLOCKS)
            ids = []
            for warp, i in product(range(FIRST_IDS // PAIR_BLOCKS), range(PAIR_BLOCKS)):
                unit = first_unit(kind, part, warp, warp_bits)
                place = begin + unit_begin(unit, pairs, warp_bits) * PAIR_BLOCKS + i
                ids.append(int(block_table[request, place]) if place < end else 0)
            numbers = (starts[request], parts << 8 | tokens, length, kind << 29 | tile << 16 | part)
            items.append((request, *numbers, rows, begin, end, *ids))
        if one.num_tiles and parts > 1:
            rows += parts * tokens * group
    table = out_items.clone()
    header = (min(len(items), len(table) - 1), rows)
    items = [(*header, 0, 0), *items][: len(table)]
    table[0, :4] = torch.tensor(items[0], dtype=table.dtype)
    if len(items) > 1:
        table[1 : len(items)] = torch.tensor(items[1:], dtype=table.dtype, device=table.device)
    return (table,)


def _attention_reference(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new out and out_lse; how the work is cut up plays no part."""
    return scattered(attend(_paged(arguments), _serves), arguments[0], arguments[1])


def _attention_error(arguments: Sequence[Any], wanted: Sequence[torch.Tensor]) -> float:
    """Return the error in units of rounding; infinite if a counter or message was left behind."""
    out, lse, mail, arrivals = arguments[0], arguments[1], arguments[11], arguments[12]
    if arrivals.any() or (mail != UNSENT).any():
        return float("inf")
    query, key_pool = arguments[2:4]
    fp16 = query.dtype == torch.float16 or key_pool.dtype != query.dtype  # bytes come as fp16
    return attention_error(_paged(arguments), out, lse, wanted, _serves, fp16_weights=fp16)


def _serves(num_tokens: int) -> bool:
    return num_tokens <= MOST_TOKENS


def _paged(arguments: Sequence[Any]) -> Paged:
    """Pick what attention depends on out of the operator's arguments."""
    return Paged(*(arguments[position] for position in _PAGED))


def _plan_bind(
    out_items: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *numbers: int,
) -> Bound:
    counts = (block_table.stride(0), seq_lens.shape[0], out_items.shape[0] - 1)
    sizes = {"requests": seq_lens.shape[0]}
    return Bound({}, sizes, (out_items, block_table, seq_lens, cu_seqlens_q, *counts, *numbers))


def _attention_bind(*arguments: Any) -> Bound:
    out, lse, query, key_pool, value_pool, block_table = arguments[:6]
    items, sinks, *workspace = arguments[8:13]
    scale, window, soft_cap, k_scale, v_scale = arguments[13:]
    kv_heads = key_pool.shape[1]
    group = query.shape[1] // kv_heads
    values = (
        out, lse, query, key_pool, value_pool, block_table, items, 0 if sinks is None else sinks,
        *workspace, *query.stride()[:2], *key_pool.stride()[:3], *value_pool.stride()[:3],
        block_table.stride(0), items.shape[0] - 1, len(workspace[1]), group, _INVERSE // group + 1,
        query.shape[2], window, scale * k_scale * _LOG2E, soft_cap * _LOG2E,
        2 / soft_cap if soft_cap else 0.0, v_scale,
    )  # fmt: skip
    variant = {
        "scalar_t": SCALARS[query.dtype],
        "head_tile": str(head_tile(query.shape[2])),
        "kv_t": _SAME if key_pool.dtype == query.dtype else _E4M3,
    }
    return Bound(variant, {"kv_heads": kv_heads}, values)


def _plan_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Return a block for each request and one for the header; on a large GPU 263 at once."""
    blocks = min(sizes["requests"] + 1, _PLAN_BLOCKS * gpu.num_multiprocessors)
    return LaunchGeometry((blocks, 1, 1), (_PLAN_THREADS, 1, 1))


def _shape(variant: Variant) -> Shape:
    itemsize = DTYPES[variant["scalar_t"]].itemsize if variant["kv_t"] == _SAME else 1
    return Shape(int(variant["head_tile"]), itemsize)


def _attention_geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """As many blocks as run at once, in pairs; the work is found on the device."""
    shape, kv_heads = _shape(variant), sizes["kv_heads"]
    grid = (kv_heads, shape.places(kv_heads, gpu), 1)
    return LaunchGeometry(grid, (32 * shape.warps, 1, 1), shape.shared_bytes(gpu))


def _plan_cost(variant: Variant, sizes: Sizes) -> Cost:
    requests = ragged(sizes)
    table = 4 * ITEM_INTS * (1 + _room(sizes)[0])
    return Cost(table + 8 * len(requests) + 4, 16 * len(requests))


def _attention_cost(variant: Variant, sizes: Sizes) -> Cost:
    shape, itemsize = _shape(variant), DTYPES[variant["scalar_t"]].itemsize
    keys = sum(length * tokens for length, tokens in ragged(sizes))
    heads = sizes["kv_heads"] * sizes["group"]
    head_dim = shape.head_tile - sizes.get("less", 0)
    moved = moved_bytes(sizes, head_dim, itemsize, shape.kv_bytes)
    return Cost(moved, 4 * keys * heads * head_dim)


def _room(sizes: Sizes) -> tuple[int, int]:
    """Return how many work items and partial rows a case may need."""
    requests = ragged(sizes)
    tokens = sum(count for _, count in requests)
    blocks = max((-(-length // KV_BLOCK) for length, _ in requests), default=0)
    shapes = (len(requests), tokens, blocks, sizes["group"])
    rule = SplitRule(*_rule(sizes))
    return most_items(rule, *shapes), most_rows(rule, *shapes)


def _rule(sizes: Sizes) -> tuple[int, int, int, int, int]:
    few, longer = sizes.get("few", sizes["most"]), sizes.get("longer", 4)
    return sizes["most"], sizes["split"], few, longer, sizes.get("warp_bits", 2)


def _plan_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    requests = ragged(sizes)
    lengths = torch.tensor([length for length, _ in requests], dtype=torch.int32)
    starts = torch.tensor([0, *(tokens for _, tokens in requests)]).cumsum(0).to(torch.int32)
    table, _ = random_table([-(-length // KV_BLOCK) for length, _ in requests])
    return _planned(sizes, table.to(device), lengths.to(device), starts.to(device))


def _planned(
    sizes: Sizes, table: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor
) -> tuple[Any, ...]:
    items = torch.zeros(1 + _room(sizes)[0], ITEM_INTS, dtype=torch.int32, device=table.device)
    numbers = (sizes["group"], sizes.get("window", 0), *_rule(sizes))
    return (items, table, lengths, starts, *numbers)


def _attention_inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[Any, ...]:
    shape, dtype = _shape(variant), DTYPES[variant["scalar_t"]]
    sizes = {**sizes, "warp_bits": shape.warp_bits}
    kv_dtype = dtype if variant["kv_t"] == _SAME else torch.float8_e4m3fn
    head_dim = shape.head_tile - sizes.get("less", 0)
    case = make_case(sizes, dtype, kv_dtype, head_dim, device)
    lengths = (case.block_table, case.seq_lens, case.cu_seqlens_q)
    (items,) = _plan_reference(*_planned(sizes, *lengths))
    rule, rows, kv_heads = SplitRule(*_rule(sizes)), max(1, _room(sizes)[1]), sizes["kv_heads"]
    floats = (kv_heads, head_dim + SCALE_ROOM)
    return (
        torch.zeros(case.query.shape, dtype=dtype, device=device),
        torch.zeros(case.query.shape[:2], device=device),
        case.query, case.key_pool, case.value_pool, *lengths, items, case.sinks,
        torch.zeros(rows, *floats, device=device),
        make_mail(rule, rows, *floats, device),
        torch.zeros(len(items), kv_heads, shape.warps, dtype=torch.int32, device=device),
        case.scale, case.window, case.soft_cap, case.k_scale, case.v_scale,
    )  # fmt: skip


_SIZES: list[dict[str, int]] = [
    {"batch": 0, "kv_heads": 2, "group": 4, "most": 6, "split": 16},
    {"batch": 1, "kv_heads": 1, "group": 1, "most": 6, "split": 16},
    {"batch": 2, "kv_heads": 1, "group": 3, "most": 3, "split": 2, "by_token": 1, "less": 16},
    {"batch": 3, "kv_heads": 1, "group": 8, "most": 33, "split": 2, "cap": 3, "sinks": 1},
    {"batch": 0, "kv_heads": 1, "group": 2, "most": 6, "split": 2, "sinks": 1, "less": 48},
    {"batch": 3, "kv_heads": 1, "group": 16, "most": 33, "split": 1, "few": 2, "window": 20},
    {"batch": 4, "kv_heads": 2, "group": 1, "most": 40, "split": 1, "sinks": 1},
    {"batch": 4, "kv_heads": 1, "group": 4, "most": 2, "split": 64, "steep": 8},
    {"batch": 4, "kv_heads": 1, "group": 4, "most": 4, "split": 64, "steep": 8},
    {"batch": 4, "kv_heads": 1, "group": 4, "most": 6, "split": 64, "steep": 8},
    {"batch": 0, "kv_heads": 1, "group": 2, "most": 6, "split": 2, "far": 1},
]
_LLAMA = {"kv_heads": 8, "group": 4, "most": 32, "split": 32, "few": 2}
_SHORT = [(1, 128), (1, 1024), (8, 1024), (64, 1024)]
_LONG = [(2, 8192), (4, 8192), (8, 8192), (64, 8192), (2, 16384), (1, 32768)]
_BENCH_SIZES: list[dict[str, int]] = [
    {**_LLAMA, "requests": requests, "context": context} for requests, context in _SHORT + _LONG
]
_BENCH_SIZES.append({**_BENCH_SIZES[0], "requests": 63, "context": 1024, "long": 131072})

_PLAN = KernelSpec(
    name="attention_plan",
    source="attention_decode/attention_plan.cu",
    entry="attention_plan",
    schema="(Tensor(a!) out_items, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "int group, int window, int max_splits, int split_blocks, int few_splits, int longer, "
    "int warp_bits) -> ()",
    arguments=("pointer",) * 4 + ("int64",) + ("int32",) * 9,
    params={},
    bind=_plan_bind,
    geometry=_plan_geometry,
    cost=_plan_cost,
    reference=_plan_reference,
    make_inputs=_plan_inputs,
    sizes=[{**sizes, "requests": len(ragged(sizes))} for sizes in _SIZES],
    bench_sizes=_BENCH_SIZES,
    tolerance=0.0,
    min_arch=80,
    paper="https://crfm.stanford.edu/2023/10/12/flashdecoding.html",
)
_ATTENTION = KernelSpec(
    name="paged_attention",
    source="attention_decode/paged_attention.cu",
    entry="paged_attention",
    schema="(Tensor(a!) out, Tensor(b!) out_lse, Tensor query, Tensor key_pool, "
    "Tensor value_pool, Tensor block_table, Tensor seq_lens, Tensor cu_seqlens_q, "
    "Tensor item_table, Tensor? sinks, Tensor(c!) workspace_partials, "
    "Tensor(d!) workspace_mail, Tensor(e!) workspace_arrivals, float scale, int window, "
    "float soft_cap, float k_scale, float v_scale) -> ()",
    arguments=("pointer",) * 11 + ("int64",) * 9 + ("int32",) * 6 + ("float",) * 4,
    params={
        "scalar_t": ["kiln::bf16", "kiln::fp16"],
        "head_tile": [str(tile) for tile in HEAD_TILES],
        "kv_t": [_SAME, _E4M3],
    },
    bind=_attention_bind,
    geometry=_attention_geometry,
    cost=_attention_cost,
    reference=_attention_reference,
    make_inputs=_attention_inputs,
    sizes=_SIZES,
    bench_sizes=_BENCH_SIZES,
    tolerance=MOST_UNITS,
    comes=comes,
    min_arch=80,
    max_cpu_seconds=1.0,
    shared_bytes=lambda variant, gpu: _shape(variant).shared_bytes(gpu),
    error=_attention_error,
    bench_needs={"scalar_t": "kiln::bf16", "head_tile": "128", "kv_t": _SAME},
    paper="https://crfm.stanford.edu/2023/10/12/flashdecoding.html",
)
SPECS = [_PLAN, _ATTENTION]
define(SPECS)
