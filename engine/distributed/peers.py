"""Bring the ranks of a custom all-reduce together, or say on all of them why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kiln.engine.distributed import tune_table
from kiln.engine.distributed.all_reduce_plan import HOST_BLOCKS, Plan, default_plan, gpu_blocks
from kiln.engine.distributed.group import Group
from kiln.engine.distributed.late_rank import LateRecord
from kiln.engine.distributed.peer_access import RankMemory, open_memory, prove_access
from kiln.engine.distributed.peer_conditions import PCIE, fabric_of, place_of
from kiln.engine.distributed.peer_handshake import (
    PROBLEM,
    Exchange,
    check_equal,
    exchange_of,
    problems_of,
    tell_all,
)
from kiln.engine.distributed.prove_sums import prove_sums
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.declare.arch import gpu, index_of
from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import SCALARS, KernelSpec, Needs
from kiln.jit_kernels.implementations import decide
from kiln.jit_kernels.ops.all_reduce.layout import MAX_WORLD, MAX_WORLDS
from kiln.jit_kernels.ops.all_reduce.members import Members
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig
from kiln.jit_kernels.ops.all_reduce.spec import SPECS
from kiln.jit_kernels.toolchains import host

FAMILY = "all_reduce"


@dataclass(frozen=True, slots=True)
class Joined:
    """A group that can sum: its plan, what connects it, and its memory."""

    plan: Plan
    fabric: str
    members: Members
    memory: RankMemory


def why_not(world: int, device: torch.device) -> str:
    """Return why no group of this size can use the kernels on a device; "" if it may."""
    env = settings()
    if env.kernel_choice(FAMILY) == "torch":
        return env.asked(FAMILY)
    if world > MAX_WORLD:
        return f"the kernels sum over at most {MAX_WORLD} ranks, and there are {world}"
    if device.type == "cpu" and env.cpu_kernels != "host":
        return "on a CPU it needs KILN_CPU_KERNELS=host"
    return ""


def sum_kernels(world: int, device: torch.device) -> tuple[Sequence[KernelSpec], Needs]:
    """Return the kernels that sum over ``world`` ranks, and their needs; none without them."""
    if world == 1 or why_not(world, device):
        return (), {}
    return SPECS, {"max_world": _capacity(world)}


def _capacity(world: int) -> str:
    """Return the smallest ``max_world`` that supports so many ranks."""
    return str(next(most for most in MAX_WORLDS if most >= world))


def join_peers(
    group: Group,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    config: ModeConfig | None,
    plan: Plan | None,
    record: LateRecord,
    watchdog_ms: int,
) -> Joined | str:
    """Return the joined group, or why it cannot sum, the same on all ranks.

    Raises ConfigError on every rank if their settings differ, or if KILN_ALL_REDUCE=jit and it
    cannot sum.
    """
    if group.size == 1:
        return "there is one rank"
    exchange, env = exchange_of(group), settings()
    told = {
        "version of the kernels": tune_table.source_hash(),
        "KILN_ALL_REDUCE": env.kernel_choice(FAMILY),
        "KILN_ALL_REDUCE_ALGORITHM": env.all_reduce_algorithm,
        "KILN_ALL_REDUCE_PCIE": env.all_reduce_pcie,
        "world size": group.size,
        "dtypes": sorted(str(dtype) for dtype in dtypes),
        "device": device.type,
        "watchdog_ms": watchdog_ms,
    }
    reason = why_not(group.size, device) or _prepared(group.size, device, dtypes)
    place: dict[str, str] = {}
    if not reason:
        try:
            place = place_of(device)
        except ConfigError as error:  # no bindings of the driver, as where CuPy launches
            reason = str(error)
    all_told = tell_all(exchange, {**told, **place, PROBLEM: reason})
    check_equal(all_told, list(told))
    joined = problems_of(all_told) or _joined(
        group, device, dtypes, config, plan, record, watchdog_ms, all_told
    )
    if isinstance(joined, str) and env.kernel_choice(FAMILY) == "jit":
        raise ConfigError(
            f"KILN_ALL_REDUCE=jit cannot be used here: {joined}; unset KILN_ALL_REDUCE"
        )
    return joined


def _prepared(world: int, device: torch.device, dtypes: Sequence[torch.dtype]) -> str:
    """Build and load the kernels of some dtypes; return why they cannot run, "" if they can."""
    env = settings()
    for dtype in dtypes:
        variant = {"scalar_t": SCALARS[dtype], "max_world": _capacity(world)}
        try:
            made = decide(SPECS, device, variant).made
            if device.type == "cpu":
                work = [(spec, variant) for spec in SPECS]
                host.prepare(work, checked=False, env=env)
        except KernelError as error:
            return str(error)
        for one in made:
            if one.implementation not in ("jit", "host"):
                return one.reason
    return ""


def _joined(
    group: Group,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    config: ModeConfig | None,
    plan: Plan | None,
    record: LateRecord,
    watchdog_ms: int,
    places: Sequence[Mapping[str, Any]],
) -> Joined | str:
    exchange, env = exchange_of(group), settings()
    fabric, problem = fabric_of(places, group.rank, allow_pcie=env.all_reduce_pcie)
    all_told = tell_all(exchange, {"fabric": fabric, PROBLEM: problem})
    problem = problems_of(all_told)
    if problem:
        return problem
    if PCIE in [one["fabric"] for one in all_told]:
        fabric = PCIE  # between some two ranks
    plan = plan or _plan(group.size, device, fabric, config)
    told = plan.fields()
    check_equal(tell_all(exchange, told), list(told))
    if not plan.max_bytes:
        return "torch sums messages of every size faster here, as kiln warmup --tune-comm measured"
    layout = plan.layout(group.size)
    try:
        memory = open_memory(layout.num_bytes, group.rank, exchange, device)
    except ConfigError as error:  # on every rank
        return str(error)
    problem = prove_access(memory, group.rank, exchange)
    if not problem:
        layout.clear(memory.own.unsqueeze(0))
        _settle(device, exchange)
        members = Members(
            layout, memory.own.unsqueeze(0), memory.peers, record.tensor, group.rank, watchdog_ms
        )
        problem = prove_sums(members, plan, dtypes, exchange, record)
    if not problem:
        layout.clear(memory.own.unsqueeze(0))  # so that calls count from 1
        _settle(device, exchange)
        return Joined(plan, fabric, members, memory)
    _settle(device, exchange)
    memory.close_peers()
    _settle(device, exchange)
    memory.close()
    return problem


def _plan(world: int, device: torch.device, fabric: str, config: ModeConfig | None) -> Plan:
    forced = settings().all_reduce_algorithm
    if config is None and forced == "auto":
        tuned = tune_table.load(tune_table.key_of(world, device, fabric))
        must = settings().kernel_choice(FAMILY) == "jit"
        if tuned is not None and (tuned.max_bytes or not must):
            return tuned
    blocks = HOST_BLOCKS
    if device.type == "cuda":
        blocks = min(gpu_blocks(world), gpu(index_of(device)).num_multiprocessors)
    return default_plan(world, forced=forced, blocks=blocks, modes=config)


def _settle(device: torch.device, exchange: Exchange) -> None:
    """Wait until every rank has done all that it has queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    tell_all(exchange, {})
