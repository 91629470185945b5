"""What the ranks of test_custom_all_reduce.py do: a program that prints their results as JSON.

Arguments: the folder of measured plans, and as JSON the worlds and the dtypes to sum.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from forked_ranks import CPU, run_ranks, set_environment

import kiln.jit_kernels.ops.norm.spec  # noqa: F401 (registers the operator)
from kiln.engine.distributed import peer_access, tune_files, tuner
from kiln.engine.distributed.all_reduce_plan import Plan
from kiln.engine.distributed.custom_all_reduce import CustomAllReduceV2
from kiln.engine.distributed.group import Group
from kiln.engine.errors import CustomAllReduceTimeout
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig
from kiln.jit_kernels.ops.all_reduce.reference import sum_ranks

PLAN = Plan(ModeConfig(256, 1024, 4096), fused_threshold=2048, max_bytes=1 << 16, max_blocks=2)
SUMMED = tuple(getattr(torch, name) for name in json.loads(sys.argv[3]))
FLOAT = (torch.float32,)
SIZES = (1, 7, 64, 129, 700, 5000)
# Rows of whole vectors, and of 132 bytes, which take 144: 15 of them would fit without padding.
FUSIBLE = ((5, 100), (6, 100), (14, 33), (15, 33))


def inputs(world: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return all ranks' messages, the same on every rank: [world, *shape]."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(world, *shape, generator=generator).to(dtype)
    x.view(world, -1)[:, 0] = -0.0
    return x


def bits(group: Group) -> Any:
    """Every algorithm and dtype gives the bits of the reference and leaves x alone."""
    ours, wrong = CustomAllReduceV2(group, CPU, dtypes=SUMMED, plan=PLAN, watchdog_ms=60_000), []
    for dtype in SUMMED:
        for n in SIZES:
            x = inputs(group.size, (n,), dtype)
            wanted, own = sum_ranks(x), x[group.rank].clone()
            for algorithm in (None, *ALGORITHMS):
                if algorithm and n * dtype.itemsize > ours.plan.layout(group.size).limit(algorithm):
                    continue
                found = ours.custom_all_reduce(own, algorithm=algorithm)
                if not same(found, wanted) or not same(own, x[group.rank]):
                    wrong.append([algorithm, str(dtype), n])
            ours.custom_all_reduce(own, out=own)
            if not same(own, wanted):
                wrong.append(["in place", str(dtype), n])
    fused = fused_is_the_same(ours, group)
    large = torch.zeros(PLAN.max_bytes // 4 + 1)
    facts = {
        "wrong": wrong,
        "disabled": ours.disabled_reason,
        "fused": fused,
        "fuses": [ours.should_fuse(torch.zeros(shape)) for shape in FUSIBLE],
        "too large": ours.should_custom_ar(large),
        "no such dtype": ours.should_custom_ar(torch.zeros(4, dtype=torch.float64)),
        "not dense": ours.should_custom_ar(torch.zeros(4, 4)[:, :2]),
        "stats": dict(ours.stats()),
    }
    ours.close()
    return facts | {"closed": ours.disabled_reason, "after": ours.should_custom_ar(large[:4])}


def fused_is_the_same(ours: CustomAllReduceV2, group: Group) -> bool:
    """Whether the fused kernel gives the bits of sum, add and norm apart."""
    good = True
    for dtype in SUMMED:
        forms = ((1e-5, 0.0, False), (1e-5, 1.0, False), (1e-5, 0.0, True))
        for (rows, d), factors in zip(((1, 64), (3, 60), (5, 100)), forms, strict=True):
            x = inputs(group.size, (rows, d), dtype)[group.rank].contiguous()
            residual, weight = torch.ones(rows, d, dtype=dtype), torch.linspace(1, 2, d).to(dtype)
            apart, kept = ours.custom_all_reduce(x), residual.clone()
            torch.ops.kiln.fused_add_rms_norm.default(apart, kept, weight, *factors)
            ours.fused_all_reduce_add_rms_norm(x, residual, weight, *factors)
            good = good and same(x, apart) and same(residual, kept)
    return good


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def skips(group: Group) -> Any:
    """The last rank leaves out its third call; all others learn who did, and so does it."""
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT, plan=PLAN, watchdog_ms=700)
    x = torch.ones(40)
    for number in range(3):
        if number < 2 or group.rank < group.size - 1:
            ours.custom_all_reduce(x)
    if group.rank == group.size - 1:
        time.sleep(1.5)
        ours.custom_all_reduce(x)  # at once: the group is poisoned
    try:
        ours.check()
    except CustomAllReduceTimeout as error:
        message = str(error)
    else:
        message = "nothing was noticed"
    begun = time.monotonic()
    try:
        ours.custom_all_reduce(x)
    except CustomAllReduceTimeout as error:
        return {"message": message, "again": str(error), "seconds": time.monotonic() - begun}
    return {"message": message, "again": "a poisoned group goes on"}


def aborted(group: Group) -> Any:
    """Rank 1 never comes; rank 0 learns of it from elsewhere, and waits no longer."""
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT, plan=PLAN, watchdog_ms=60_000)
    if group.rank == 1:
        return {}
    threading.Timer(0.3, ours.abort).start()
    begun = time.monotonic()
    ours.custom_all_reduce(torch.ones(40))
    seconds = time.monotonic() - begun
    try:
        ours.check()
    except CustomAllReduceTimeout as error:
        return {"seconds": seconds, "message": str(error)}
    return {"seconds": seconds, "message": "nothing was noticed"}


def differs(group: Group) -> Any:
    """The limits of rank 1 are not those of the others."""
    config = ModeConfig(4096 if group.rank == 1 else 2048)
    CustomAllReduceV2(group, CPU, dtypes=FLOAT, config=config)


def waits_differ(group: Group) -> Any:
    CustomAllReduceV2(group, CPU, dtypes=FLOAT, watchdog_ms=1000 + (group.rank == 0))


def no_access(group: Group) -> Any:
    """Rank 0 reads something else than what was written."""
    kept = peer_access._read
    if group.rank == 0:
        peer_access._read = lambda memory, offset: bytes(64)
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT, plan=PLAN)
    peer_access._read = kept
    return {"disabled": ours.disabled, "reason": ours.disabled_reason, "check": ours.check()}


def no_memory(group: Group) -> Any:
    from kiln.engine.errors import ConfigError

    def refuse(*_: Any) -> Any:
        raise ConfigError("the ranks cannot share memory: rank 0: there is none")

    from kiln.engine.distributed import peers

    kept, peers.open_memory = peers.open_memory, refuse
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT, plan=PLAN)
    peers.open_memory = kept
    return {"disabled": ours.disabled, "reason": ours.disabled_reason}


def torch_only(group: Group) -> Any:
    """One rank's environment says torch: every rank hears of it, and none waits."""
    set_environment(KILN_ALL_REDUCE="torch")
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT)
    facts = {"disabled": ours.disabled, "reason": ours.disabled_reason}
    set_environment()
    return facts


def environment_differs(group: Group) -> Any:
    set_environment(**({"KILN_ALL_REDUCE": "torch"} if group.rank == 1 else {}))
    try:
        CustomAllReduceV2(group, CPU, dtypes=FLOAT)
    finally:
        set_environment()


def must_work(group: Group) -> Any:
    """KILN_ALL_REDUCE=jit where the kernels cannot run."""
    set_environment(KILN_ALL_REDUCE="jit", KILN_CPU_KERNELS="torch")
    try:
        CustomAllReduceV2(group, CPU, dtypes=FLOAT)
    finally:
        set_environment(KILN_CPU_KERNELS="host")


def measured(ours: CustomAllReduceV2, kernel_ns: int, torch_ns: int) -> tuner.Tuned:
    """Tune with given times: a busy machine's could favour either."""

    def nanoseconds(call: Any, device: Any, kernels: Any) -> int:
        call()
        return torch_ns if kernels is None else kernel_ns

    kept, tuner.nanoseconds_of = tuner.nanoseconds_of, nanoseconds
    found = ours.tune((256, 2048), torch.float32)
    tuner.nanoseconds_of = kept
    return found


def tuned(group: Group) -> Any:
    """Measure, keep, and find it again in a new group."""
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT, watchdog_ms=60_000)
    before = ours.plan.modes.measured

    found = measured(ours, 1000, 9000)
    if group.rank == 0:
        ours.store(found)
    group.minimum([0])
    ours.close()
    again = CustomAllReduceV2(group, CPU, dtypes=FLOAT, watchdog_ms=60_000)
    facts = {
        "before": before,
        "alike": again.plan == found.plan,
        "plan": found.plan.fields(),
        "names": sorted({row["algorithm"] for row in found.rows}),
        "blocks": sorted({row["blocks"] for row in found.rows}),
    }
    again.close()
    return facts


def torch_is_faster(group: Group) -> Any:
    """Measured so: engines leave all sums to torch, unless KILN_ALL_REDUCE=jit asks for kernels."""
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT, watchdog_ms=60_000)
    if group.rank == 0:
        ours.store(measured(ours, 9000, 1000))
    else:
        measured(ours, 9000, 1000)
    ours.close()
    group.minimum([0])
    again = CustomAllReduceV2(group, CPU, dtypes=FLOAT, watchdog_ms=60_000)
    set_environment(KILN_ALL_REDUCE="jit")
    forced = CustomAllReduceV2(group, CPU, dtypes=FLOAT, watchdog_ms=60_000)
    set_environment()
    facts = {"reason": again.disabled_reason, "forced": forced.disabled_reason}
    forced.close()
    return facts


def wrong_bits(group: Group) -> Any:
    """An algorithm that gives wrong sums on one rank is not timed on any."""
    ours = CustomAllReduceV2(group, CPU, dtypes=FLOAT, plan=PLAN, watchdog_ms=60_000)
    kept = tuner.expected
    if group.rank == 1:
        tuner.expected = lambda *arguments: kept(*arguments) + 1
    try:
        ours.tune((256,), torch.float32)
    finally:
        tuner.expected = kept
        ours.close()


CASES = {
    "bits": bits, "skips": skips, "differs": differs, "waits_differ": waits_differ,
    "no_access": no_access, "no_memory": no_memory, "torch_only": torch_only,
    "environment_differs": environment_differs, "must_work": must_work, "tuned": tuned,
    "wrong_bits": wrong_bits, "aborted": aborted, "torch_is_faster": torch_is_faster,
}  # fmt: skip

if __name__ == "__main__":
    set_environment(KILN_CPU_KERNELS="host")
    tune_files.cache_root = lambda env: Path(sys.argv[1])  # the kernels stay where they are
    torch.set_num_threads(1)
    few = {name: CASES[name] for name in ("bits", "skips")}
    worlds = json.loads(sys.argv[2])
    found = {world: run_ranks(int(world), CASES if world == "2" else few) for world in worlds}
    print(json.dumps(found), file=sys.stdout)
