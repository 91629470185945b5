"""Engines of several ranks that share one GPU: their tokens, and what happens if a rank is lost.

Each rank gets the variables that torchrun sets on a machine with a single GPU. NCCL_HOSTID differs
between ranks, because NCCL refuses two ranks on one GPU of the same machine. In this way the same
code runs as on several GPUs: kernels over CUDA IPC and NCCL, both inside CUDA graphs. The processes
take turns on the GPU, for milliseconds each, so only the time until a lost rank is noticed is
measured.
"""

from __future__ import annotations

import argparse
import json
import socket
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu import greedy
from gpu.pace import Pace, Row
from gpu.ranks import run_processes
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS

_SCRIPT = Path(__file__).with_name("engine_rank.py")
_SECONDS = 100.0  # of an engine
_AT_ONCE = 5  # engines
_EXPERTS = ("Mixtral", "Qwen3Moe")  # in float32 torch computes them, and no graph can contain it
_LONGEST = {"kill": 5.0, "stop": 15.0}  # seconds until clients are told
NCCL = "torch"  # as an algorithm: no kernel sums


@dataclass(frozen=True)
class Case:
    """An engine and its requests. ``lost``: "kill" or "stop" its last rank while it generates.

    ``wanted``: the tokens for each prompt; empty: those of the dtype's first case.
    """

    what: str
    folder: str
    world: int
    prompts: list[list[int]]
    wanted: list[list[int]] = field(default_factory=list)
    dtype: str = "float32"
    algorithm: str = "auto"
    graphs: bool = True
    adapters: dict[str, str] = field(default_factory=dict)
    names: list[str | None] = field(default_factory=list)
    lost: str = ""
    device: str = "cuda"
    max_tokens: int = 24


def tensor_parallel(args: argparse.Namespace) -> list[Row]:
    """Return a row for each engine; several run at the same time."""
    greedy.exact_products()
    pace = Pace(args, seconds=170)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(_AT_ONCE) as pool:
        cases = all_cases(Path(name), "cuda", [*greedy.FAMILIES][: 1 if args.quick else None])
        running = [(case, pool.submit(run, case)) for case in cases]
        first: dict[str, Any] = {}  # tokens by dtype

        def judged(item: tuple[Case, Future[list[Row]]]) -> Iterator[Row]:
            return judge(item[0], item[1].result(), first)

        return pace.rows(running, lambda item: item[0].what, judged)


def all_cases(folder: Path, device: str, families: list[str]) -> list[Case]:
    """Make models and adapters; return the engines that serve them."""
    cases = []
    for family in families:
        own = folder / family
        model = greedy.made_model(family, own)
        prompts = greedy.prompts()
        base = [greedy.generate(model.to(device), prompt, device) for prompt in prompts]
        plain = Case(family, str(own), 2, prompts, base, device=device)
        cases.append(replace(plain, graphs=family not in _EXPERTS))
        if family in greedy.LORA_FAMILIES:
            names, paths, wanted, _ = greedy.with_adapters(model, own, prompts, base, device)
            cases.append(replace(
                plain, what=f"{family} with LoRA", wanted=wanted, adapters=paths, names=names
            ))  # fmt: skip
        if family == "Llama":
            cases += [replace(plain, world=4), replace(plain, algorithm=NCCL)]
            cases += rounded_cases(plain)
            lost = replace(plain, max_tokens=180, wanted=[])
            cases += [replace(lost, what=f"{how} a rank", lost=how) for how in _LONGEST]
    return cases


def rounded_cases(plain: Case) -> list[Case]:
    """Return engines in bfloat16. A sum of two ranks is rounded once, so all give equal tokens."""
    without = replace(plain, dtype="bfloat16", wanted=[], algorithm=NCCL, graphs=False)
    launched = replace(without, algorithm="auto")
    algorithms = [replace(without, algorithm=name, graphs=True) for name in ("auto", *ALGORITHMS)]
    return [without, launched, replace(without, graphs=True), *algorithms]


def judge(case: Case, rows: list[Row], first: dict[str, Any]) -> Iterator[Row]:
    """Yield the rows of an engine, with ``ok``. ``first``: tokens of each dtype's first case."""
    row, *failed = rows
    tokens = row.pop("tokens", None)
    sums = "NCCL" if case.algorithm == NCCL else case.algorithm
    facts = {"what": case.what, "ranks": case.world, "dtype": case.dtype, "sums": sums}
    if case.lost:
        row["ok"] = f"rank {case.world - 1} of" in row.get("told", "")
        row["ok"] &= row.get("seconds", 1e9) <= _LONGEST[case.lost]
    elif tokens is not None:
        wanted = case.wanted or first.setdefault(case.dtype, tokens)
        wrong = sum(a != b for a, b in zip(tokens, wanted, strict=True))
        row |= {"graphs": case.graphs, "prompts": len(tokens), "wrong": wrong}
        row["ok"] = wrong == 0 and _used(case, row)
    yield {**facts, **row}
    yield from ({**facts, **one} for one in failed)


def _used(case: Case, row: Row) -> bool:
    """Whether the sums and the graphs that the case is about have run."""
    counts: dict[str, int] = row["calls"]
    named = {"auto": "fused_all_reduce_add_rms_norm"}.get(case.algorithm, case.algorithm)
    wants_replays = case.graphs and case.device == "cuda"
    return counts.get(named, 0) > 0 and (row["replays"] > 0 or not wants_replays)


def run(case: Case) -> list[Row]:
    """Run an engine; return rank 0's row, and one if a rank has failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    may_fail = {case.world - 1} if case.lost else set()
    given = partial(_variables, case, port)
    rows = run_processes(
        _SCRIPT, [json.dumps(asdict(case))], case.world, _SECONDS,
        variables=given, may_fail=may_fail,
    )  # fmt: skip
    return rows or [{"status": "it gave no rows", "ok": False}]


def _variables(case: Case, port: int, rank: int) -> dict[str, str]:
    """Return the environment of a rank: that of torchrun on a machine of its own."""
    by_torch = case.algorithm == NCCL
    return {
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(case.world),
        "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "check", "NCCL_HOSTID": str(rank),
        "KILN_ALL_REDUCE": "torch" if by_torch else "jit",
        "KILN_ALL_REDUCE_ALGORITHM": "auto" if by_torch else case.algorithm,
    }  # fmt: skip
