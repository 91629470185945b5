"""The sections of ``gpu_check --gpus N``: a process for each GPU, except for the first section."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

from gpu.pace import NotMeasured, Pace, Row
from gpu.ranks import run_job

_COPY_BYTES = 256 << 20
_COPIES, _TRIALS = 10, 5


def links(args: argparse.Namespace) -> list[Row]:
    """Return a row for each pair of GPUs: peer access, the link, and copy bandwidth in GB/s."""
    _check_gpus(args)
    pairs = [(one, other) for one in range(args.gpus) for other in range(args.gpus) if one != other]
    return Pace(args, seconds=40).rows(pairs, lambda pair: f"{pair[0]} to {pair[1]}", _link)


def _link(pair: tuple[int, int]) -> list[Row]:
    from kiln.engine.distributed.peer_conditions import fabric_of, place_of

    places = [place_of(torch.device("cuda", index)) for index in pair]
    fabric, reason = fabric_of(places, 0, allow_pcie=True)
    access = torch.cuda.can_device_access_peer(*pair)
    row: Row = {"kernel": f"{pair[0]} to {pair[1]}", "access": access, "link": fabric or reason}
    return [row | {"GB/s": _copy_rate(*pair), "ok": True}]


def _copy_rate(one: int, other: int) -> float:
    """Return the bandwidth of copies from one GPU to another."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{one}")
    target = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=f"cuda:{other}")
    rates = []
    with torch.cuda.device(one):
        for _ in range(_TRIALS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            target.copy_(source)
            begin.record()
            for _ in range(_COPIES):
                target.copy_(source)
            end.record()
            end.synchronize()
            rates.append(_COPIES * _COPY_BYTES / begin.elapsed_time(end) / 1e6)
    return statistics.median(rates)


def _of_job(job: str, seconds: float) -> Callable[[argparse.Namespace], list[Row]]:
    def section(args: argparse.Namespace) -> list[Row]:
        _check_gpus(args)
        return run_job(job, args.gpus, "", quick=args.quick, seconds=seconds)

    return section


bits = _of_job("gpu.rank_checks:bits", 60.0)
rounds = _of_job("gpu.rank_checks:rounds", 100.0)
skipped = _of_job("gpu.rank_checks:skipped", 50.0)
tuned = _of_job("gpu.rank_times:tuned", 100.0)
latency = _of_job("gpu.rank_times:latency", 90.0)
fused = _of_job("gpu.rank_times:fused", 50.0)


def _check_gpus(args: argparse.Namespace) -> None:
    there = torch.cuda.device_count()
    if there < args.gpus:
        raise NotMeasured(f"--gpus {args.gpus}: torch sees {there} GPUs")
