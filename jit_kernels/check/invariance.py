"""Batch invariance: a request's attention has the same bits in any batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import Gpu, KernelSpec, LaunchGeometry, Sizes, Variant
from kiln.jit_kernels.launch import launch
from kiln.jit_kernels.ops.attention.cases import FAR, changed, make_case
from kiln.jit_kernels.ops.attention.variants import head_tile
from kiln.jit_kernels.ops.attention_decode.splits import Shape, SplitRule
from kiln.jit_kernels.ops.attention_decode.workspace import workspace_for
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host

_PADDING = -1  # a request with no key and one query, as CUDA graphs pad their batches
_KINDS = (
    (torch.bfloat16, torch.bfloat16, 64),
    (torch.float16, torch.float16, 112),
    (torch.bfloat16, torch.float8_e4m3fn, 64),
)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch configuration. No result may depend on it."""

    blocks: int  # grid size per KV head, even
    seed: int  # scheduler seed of the host toolchain


def attention_trials(
    device: torch.device, batches: int, seed: int, *, longest: int = 1500
) -> list[str]:
    """Run random batches of decode attention; return the failures.

    Each request's rows are compared bit by bit with those of the same request alone and in other
    batches. These have other neighbours, positions, padding, block table widths, grids and, on the
    host toolchain, schedules. ``device``: a CUDA device, or the CPU for the host toolchain.
    ``longest``: most keys of a request.
    """
    failures = []
    for number in range(batches):
        chance = random.Random(f"{seed}/{number}")
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(chance.randrange(2**31))
            failures += [f"batch {number}: {one}" for one in _trial(chance, device, longest)]
    return failures


def _trial(chance: random.Random, device: torch.device, longest: int) -> list[str]:
    """Return the differences between several arrangements of one random batch."""
    requests, shared = _requests(chance, longest)
    dtype, kv_dtype, head_dim = chance.choice(_KINDS)
    sizes = {
        "kv_heads": chance.choice((1, 2)),
        "group": chance.choice((1, 3, 4, 8)),
        "window": chance.choice((0, 0, 50, -70)),
        "cap": chance.choice((0, 0, 5)),
        "sinks": chance.choice((0, 1)),
        "by_token": chance.choice((0, 1)),
        "shared": shared,
    }
    case = make_case(sizes, dtype, kv_dtype, head_dim, str(device), requests=requests)
    rule = SplitRule(
        chance.choice((1, 3, 6, 40)),
        chance.choice((1, 2, 16, 64)),
        chance.choice((2, 40)),
        chance.choice((2, 4)),
        Shape(head_tile(head_dim), kv_dtype.itemsize).warp_bits,
    )
    everybody = range(len(requests))
    wanted = _rows(case, list(everybody), rule, _Launch(6, 0))
    orders: list[list[int]] = [[request] for request in everybody]
    for _ in range(2):
        order = chance.sample(everybody, chance.randint(1, len(requests)))
        for _ in range(chance.randint(0, 3)):
            order.insert(chance.randint(0, len(order)), _PADDING)
        orders.append(order)
    failures = []
    for order in orders:
        blocks = 2 * chance.choice((1, 2, 3, 4, 20))  # with 40, every block has at most one item
        how = _Launch(blocks, chance.randrange(1000))
        for request, rows in _rows(case, order, rule, how).items():
            if not torch.equal(rows, wanted[request]):
                failures.append(f"{requests[request]} differs in {order} with {how}, {sizes}")
    return failures


def _requests(chance: random.Random, longest: int) -> tuple[list[tuple[int, int]], int]:
    """Return random requests and how many first tokens they have in common.

    In a part of the batches they are so alike that some share work items.
    """
    if chance.random() < 0.6:
        return [_request(chance, longest) for _ in range(chance.randint(1, 6))], 0
    length = chance.randint(longest // 2, longest)
    alike = [
        (length - chance.randint(0, 16), chance.choice((1, 1, 1, 1, 2)))
        for _ in range(chance.randint(3, 8))
    ]
    return alike, length - chance.randint(0, length // 4)


def _request(chance: random.Random, longest: int) -> tuple[int, int]:
    """Return a random (length, query tokens); some are prefill requests."""
    length = chance.choice((0, 1, chance.randint(2, 60), chance.randint(60, longest)))
    return length, chance.choice((1, 1, 1, min(max(length, 1), chance.randint(2, 18))))


def _rows(
    case: SimpleNamespace, order: list[int], rule: SplitRule, how: _Launch
) -> dict[int, torch.Tensor]:
    """Run requests of a case in an order; return request -> the bits of its out and lse."""
    batch = _arranged(case, order)
    out, lse = _run(batch, rule, how)
    together = torch.cat((out.view(torch.int16).int().flatten(1), lse.view(torch.int32)), dim=1)
    starts = batch.cu_seqlens_q.tolist()
    return {
        request: together[starts[place] : starts[place + 1]]
        for place, request in enumerate(order)
        if request != _PADDING
    }


def _arranged(case: SimpleNamespace, order: list[int]) -> SimpleNamespace:
    """Return a call with some requests in an order and another width of the block table."""
    device, starts = case.query.device, case.cu_seqlens_q.tolist()
    padding = torch.full((1, *case.query.shape[1:]), float("nan"), device=device)
    queries = [
        padding.to(case.query.dtype)
        if request == _PADDING
        else case.query[starts[request] : starts[request + 1]]
        for request in order
    ]
    width = case.block_table.shape[1] + len(order)
    table = torch.full((len(order), width), FAR, dtype=torch.int32, device=device)
    for row, request in zip(table, order, strict=True):
        if request != _PADDING:
            row[: case.block_table.shape[1]] = case.block_table[request]
    lengths = case.seq_lens.tolist()
    ends = torch.tensor([0, *(len(rows) for rows in queries)]).cumsum(0)
    return changed(
        case,
        query=torch.cat(queries),
        block_table=table,
        seq_lens=_int32([0 if one == _PADDING else lengths[one] for one in order], device),
        cu_seqlens_q=_int32(ends.tolist(), device),
    )


def _run(case: SimpleNamespace, rule: SplitRule, how: _Launch) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the plan kernel and attention on the device; return out and lse."""
    workspace = workspace_for(case, rule)
    workspace.partials.fill_(float("nan"))
    items, group = workspace.items[case.window], case.query.shape[1] // case.key_pool.shape[1]
    plan = {**vars(case), **rule.arguments(), "items": items, "group": group}
    plan["shared"] = workspace.shared
    _launch("shared_blocks", plan, how)
    _launch("attention_plan", plan, how)
    arguments = {
        **vars(case),
        "out": torch.zeros_like(case.query),
        "lse": torch.zeros(case.query.shape[:2], device=case.query.device),
        "items": items,
        "partials": workspace.partials,
        "mail": workspace.mail,
        "arrivals": workspace.arrivals,
    }
    _launch("paged_attention", arguments, how)
    return arguments["out"], arguments["lse"]


def _launch(name: str, named: dict[str, Any], how: _Launch) -> None:
    """Run a kernel on ``how.blocks`` blocks with the arguments in ``named`` that it takes."""
    whole = find_spec(name)
    a = whole.parameters.Arguments(**{key: named[key] for key in whole.parameters.names})

    def geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
        own = whole.geometry(variant, sizes, gpu)
        if name == "shared_blocks":
            return own
        grid = (sizes["kv_heads"], how.blocks, 1) if "kv_heads" in sizes else (how.blocks, 1, 1)
        return replace(own, grid=grid)

    spec: KernelSpec = replace(whole, geometry=geometry)
    if a.seq_lens.is_cuda:
        launch(spec, a)
        return
    kernel = host.load(whole, spec.bind(a).variant, checked=False, env=settings())
    host.launch(kernel, spec, a, seed=how.seed)


def _int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
