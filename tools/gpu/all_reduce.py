"""All-reduce among virtual ranks of one GPU: their bits, round after round, and their times.

The kernels are those of real groups. What is missing is a link between GPUs, so the times say what
the kernels themselves take, and nothing of NVLink.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch

from gpu.pace import Pace, Row
from kiln.jit_kernels.ops.all_reduce.functions import all_reduce
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, MAX_WORLD, MIN_WORLD, Algorithm
from kiln.jit_kernels.ops.all_reduce.members import Members
from kiln.jit_kernels.ops.all_reduce.reference import sum_ranks
from kiln.jit_kernels.ops.all_reduce.virtual import VirtualGroup

_WORLDS = [*range(MIN_WORLD, MAX_WORLD + 1)]
_ROUNDS, _REPLAYS = 100_000, 10_000
_CASES = 21  # in a graph; odd, so that a case takes both phases of its slots in turn
_SIZES = (1, 7, 520, 4097, 24_576)  # elements
_DTYPES = (torch.bfloat16, torch.float32, torch.float16)
_MOST_CYCLES = 12_000  # of a delay before a rank's call
_MAX_BYTES, _LARGE = 128 << 10, 4 << 20
_BYTES = [1 << power for power in range(10, 23, 2)]
_INTEGERS = {2: torch.int16, 4: torch.int32}
_CALLS = 20  # in a graph that is timed
Work = Callable[[], Any]


def rounds(args: argparse.Namespace) -> list[Row]:
    """Return a row for each group size: how many of its rounds gave wrong bits."""
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # by default streams share 8 queues
    share = 10 if args.quick else 1
    return Pace(args, seconds=80).rows(
        _WORLDS, _name, lambda world: iter([skewed(world, share=share)])
    )


def latency(args: argparse.Namespace) -> list[Row]:
    """Return a row for each group size and message size: microseconds of each algorithm."""
    return Pace(args, seconds=50).rows(_WORLDS[::2] if args.quick else _WORLDS, _name, times)


def _name(world: int) -> str:
    return f"{world} ranks"


@dataclass(frozen=True)
class Case:
    """A call of all ranks: x, what it must give, and where it writes; [world, size] each."""

    algorithm: Algorithm
    x: torch.Tensor
    want: torch.Tensor
    out: torch.Tensor

    def wrong(self) -> torch.Tensor:
        """Return whether any bit is wrong, as a number on the device."""
        kind = _INTEGERS[self.out.element_size()]
        return (self.out.view(kind) != self.want.view(kind)).any().long()


def cases(world: int, device: str) -> list[Case]:
    """Return calls of every algorithm, dtype and size, in one order for all ranks."""
    made = []
    kinds = zip(cycle(ALGORITHMS), cycle(_DTYPES), cycle(_SIZES), strict=False)
    for algorithm, dtype, size in islice(kinds, _CASES):
        x = torch.randn(world, size, device=device).to(dtype)
        want = sum_ranks(x).expand_as(x).contiguous()
        made.append(Case(algorithm, x, want, torch.empty_like(x)))
    return made


def skewed(world: int, device: str = "cuda", share: int = 1) -> Row:
    """Return a row: rounds in which each rank has a stream and delays of its own, and replays.

    On a CPU one launch runs all ranks.
    """
    group = VirtualGroup(world, device, max_bytes=_MAX_BYTES, max_blocks=4)
    made = cases(world, device)
    wrong = torch.zeros((), dtype=torch.long, device=device)
    owns = [own_members(group, rank) for rank in range(world)]  # graphs read them

    def clear() -> None:
        for case in made:
            case.out.fill_(float("nan"))

    def together() -> None:
        for case in made:
            group.all_reduce(case.x, case.algorithm, out=case.out)

    def compare() -> None:
        for case in made:
            wrong.add_(case.wrong())

    at_once = [partial(_calls, own, made) for own in owns] if device == "cuda" else [together]
    together()  # loads the kernels, which a capture forbids
    replays = _repeat(clear, [together], compare, _REPLAYS // share, device)
    num_rounds = _repeat(clear, at_once, compare, _ROUNDS // share // _CASES, device) * _CASES
    late = group.late_ranks()
    return {
        "ranks": world, "streams": len(at_once), "rounds": num_rounds,
        "replays": replays, "wrong": int(wrong), "late": "; ".join(map(str, late)),
        "ok": int(wrong) == 0 and not late,
    }  # fmt: skip


def own_members(group: VirtualGroup, rank: int) -> Members:
    """Return the group as one of its ranks sees it in a launch of its own."""
    whole, rows = group.members, slice(rank, rank + 1)
    distance = rank * group.layout.num_bytes
    return Members(
        group.layout, whole.buffers[rows], whole.peers - distance, whole.record[rows], rank
    )


def _calls(own: Members, made: list[Case]) -> None:
    """Make the calls of one rank, with random delays before them."""
    rows = slice(own.first_rank, own.first_rank + 1)
    for case in made:
        torch.cuda._sleep(int(torch.randint(_MOST_CYCLES, ())))
        all_reduce(case.x[rows], own, case.algorithm, out=case.out[rows])


def _repeat(before: Work, at_once: list[Work], after: Work, times: int, device: str) -> int:
    """Do some work ``times`` times, on a GPU by replaying graphs; return how often it was done.

    The calls of ``at_once`` run at the same time. Each has its own graph and stream, because CUDA
    may run branches of a single graph one after the other. On a CPU all is done once.
    """
    if device == "cpu":
        for work in (before, *at_once, after):
            work()
        return 1
    main, streams = torch.cuda.current_stream(), [torch.cuda.Stream() for _ in at_once]
    first, last, *graphs = [_graph(work) for work in (before, after, *at_once)]
    for _ in range(times):
        first.replay()
        for stream, graph in zip(streams, graphs, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                graph.replay()
        for stream in streams:
            main.wait_stream(stream)
        last.replay()
    torch.cuda.synchronize()
    return times


def _graph(work: Work) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def times(world: int, device: str = "cuda") -> Iterator[Row]:
    """Yield a row for each message size; "torch": its sum on one GPU, without any exchange."""
    group = VirtualGroup(world, device, max_bytes=_LARGE, max_blocks=16)
    for num_bytes in _BYTES:
        x = torch.randn(world, num_bytes // 2, device=device).bfloat16()
        out = torch.empty_like(x)
        row: Row = {"ranks": world, "bytes": num_bytes}
        for algorithm in ALGORITHMS:
            row[algorithm] = _microseconds(partial(group.all_reduce, x, algorithm, out=out))
        row["torch"] = _microseconds(lambda x=x: sum_ranks(x).expand_as(x).contiguous())  # type: ignore[misc]
        yield row | {"ok": not group.late_ranks()}


def _microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of a call in a CUDA graph of several."""
    call()
    torch.cuda.synchronize()
    graph = _graph(lambda: [call() for _ in range(_CALLS)])
    found = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end) / _CALLS)
    return statistics.median(found)
