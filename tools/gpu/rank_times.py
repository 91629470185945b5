"""Times of real groups: Kiln's sums beside NCCL and torch's symmetric memory, in one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed

import kiln.jit_kernels.ops.norm.spec  # noqa: F401 (registers the operator)
from gpu.pace import Row, first_line
from gpu.ranks import Ranks
from kiln.engine.distributed.all_reduce_plan import MAX_BYTES, Plan, gpu_blocks
from kiln.engine.distributed.custom_all_reduce import CustomAllReduceV2
from kiln.engine.distributed.timing import nanoseconds_of
from kiln.engine.distributed.tuner import FEW_SIZES, SIZES
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig

_DTYPE = torch.bfloat16
_HIDDEN = 4096
_FACTORS = (1e-5, 0.0, False)  # eps, weight_offset and round_once of the norm
_PUSHED = 64 << 20  # bytes of all ranks' messages in the slots of the algorithms that push
_dist: Any = torch.distributed  # torch types only part of it


def latency(ranks: Ranks) -> list[Row]:
    """Return a row for each message size: microseconds of each way, on the slowest rank.

    "auto": what an engine would use, with a measured plan if there is one.
    """
    dtype = _DTYPE if ranks.device.type == "cuda" else torch.float32
    sizes = FEW_SIZES if ranks.device.type == "cpu" else SIZES[::3] if ranks.quick else SIZES
    most = min(MAX_BYTES, _PUSHED // ranks.group.size)
    blocks = gpu_blocks(ranks.group.size) if ranks.device.type == "cuda" else 2
    auto = ranks.kernels(dtype)
    each = ranks.kernels(
        dtype, plan=Plan(ModeConfig(most), 1, max_bytes=MAX_BYTES, max_blocks=blocks)
    )
    symmetric, reason = _symmetric(ranks, max(sizes), dtype)
    rows = []
    for size in sizes:
        x = torch.zeros(size // dtype.itemsize, dtype=dtype, device=ranks.device)
        out = torch.empty_like(x)
        row: Row = {"ranks": ranks.group.size, "bytes": size}
        chosen = auto.algorithm_for(x)
        row |= {"chosen": chosen or "torch"}
        if chosen is not None:
            row["auto"] = _us(ranks, auto, lambda x=x, out=out: auto.custom_all_reduce(x, out=out))
        for name in ALGORITHMS:
            if size <= each.plan.layout(ranks.group.size).limit(name):
                call = _call(each, x, out, name)
                row[name] = _us(ranks, each, call)
        if ranks.group.device == ranks.device:
            row["torch"] = _us(ranks, None, lambda x=x: ranks.group.all_reduce_by_torch(x))
        for name, function in symmetric.items():
            row[name] = _us(ranks, None, partial(function, x.numel()))
        rows.append(row | ({"symm_mem": reason} if reason else {}) | {"ok": True})
    for kernels in (auto, each):
        kernels.check()
        kernels.close()
    return rows


def _call(kernels: CustomAllReduceV2, x: Any, out: Any, name: Any) -> Callable[[], Any]:
    return lambda: kernels.custom_all_reduce(x, out=out, algorithm=name)


def _us(ranks: Ranks, kernels: Any, call: Callable[[], Any]) -> float:
    """Return the microseconds of a call on the slowest rank."""
    ranks.meet()
    own = nanoseconds_of(call, ranks.device, kernels)
    return -ranks.group.minimum([-own])[0] / 1000


def _symmetric(
    ranks: Ranks, num_bytes: int, dtype: torch.dtype
) -> tuple[dict[str, Callable[[int], Any]], str]:
    """Return torch's sums over symmetric memory, by name, of the first n elements; or why not."""
    if ranks.group.device.type != "cuda":
        return {}, "needs a GPU for each rank"
    try:
        import torch.distributed._symmetric_memory as symmetric_memory

        store = _dist.FileStore(str(ranks.folder / "symmetric"), ranks.group.size)
        _dist.init_process_group(
            "nccl", store=store, rank=ranks.group.rank, world_size=ranks.group.size,
            device_id=ranks.device,
        )  # fmt: skip
        name = _dist.group.WORLD.group_name
        x = symmetric_memory.empty(num_bytes // dtype.itemsize, dtype=dtype, device=ranks.device)
        symmetric_memory.rendezvous(x, name)
        x.zero_()
        torch.cuda.synchronize()
        _dist.barrier()
    except Exception as error:  # another torch, or another machine
        return {}, f"not measurable: {first_line(error)}"
    one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_
    return {
        "symm_mem one-shot": lambda n: one(x[:n], "sum", name),
        "symm_mem two-shot": lambda n: two(x[:n], "sum", name),
    }, ""


def fused(ranks: Ranks) -> list[Row]:
    """Return a row for each number of tokens: sum, add and norm in one kernel, and apart."""
    on_gpu = ranks.device.type == "cuda"
    dtype, d = (_DTYPE, _HIDDEN) if on_gpu else (torch.float32, 64)
    kernels, rows = ranks.kernels(dtype), []
    weight = torch.ones(d, dtype=dtype, device=ranks.device)
    for tokens in (
        (1, 2) if not on_gpu else (1, 8, 32, 128) if ranks.quick else (1, 2, 4, 8, 16, 32, 64, 128)
    ):
        x = torch.zeros(tokens, d, dtype=dtype, device=ranks.device)
        residual = torch.zeros_like(x)
        if not kernels.should_fuse(x):
            continue
        together = _us(ranks, kernels, _fused_call(kernels, x, residual, weight))
        apart = _us(ranks, kernels, _apart_call(kernels, x, residual, weight))
        rows.append({
            "ranks": ranks.group.size, "tokens": tokens, "hidden": d, "fused": together,
            "apart": apart, "ratio": apart / together, "ok": True,
        })  # fmt: skip
    kernels.check()
    kernels.close()
    return rows


def _fused_call(kernels: Any, x: Any, residual: Any, weight: Any) -> Callable[[], Any]:
    return lambda: kernels.fused_all_reduce_add_rms_norm(x, residual, weight, *_FACTORS)


def _apart_call(kernels: Any, x: Any, residual: Any, weight: Any) -> Callable[[], Any]:
    def apart() -> None:
        kernels.custom_all_reduce(x, out=x)
        torch.ops.kiln.fused_add_rms_norm.default(x, residual, weight, *_FACTORS)

    return apart


def tuned(ranks: Ranks) -> list[Row]:
    """Return the row of the measured plan, which is kept for the sections behind, and its times."""
    on_gpu = ranks.device.type == "cuda"
    dtype = _DTYPE if on_gpu else torch.float32
    kernels = ranks.kernels(dtype)
    found = kernels.tune(SIZES if on_gpu else FEW_SIZES, dtype)
    path = kernels.store(found) if ranks.group.rank == 0 else None
    ranks.meet()
    kernels.close()
    plan = {name: value for name, value in found.plan.fields().items() if name != "forced"}
    return [
        {"ranks": ranks.group.size, **plan, "file": path.name if path else "", "ok": True},
        *({"times": json.dumps(row)} for row in found.rows),
    ]
