#!/usr/bin/env python3
"""Time the compile of every program on this machine; write benchmarks/compile.{json,md,png}.

    python tools/bench_compile.py                                # all: 7 minutes
    python tools/bench_compile.py --kernels rms_norm quantize    # update only these

The times are CPU seconds of the thread that runs NVRTC, the best of several rounds over all
programs, because other load only adds to them. The record has each cubin's size too: if it changes
too much, a test no longer trusts the program's time. Every round also times a fixed program. Tests
on other machines compare compile times as multiples of its time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from compile_yardstick import yardstick_seconds  # noqa: E402 - after the path, as all below
from rich.progress import Progress  # noqa: E402

from kiln.cache.disk.store import Store  # noqa: E402
from kiln.engine.bench.report import Plots, Report, table  # noqa: E402
from kiln.engine.bench.style import KILN_COLOUR, ROOF_COLOUR, legend_below, titled  # noqa: E402
from kiln.jit_kernels.compile.build import build  # noqa: E402
from kiln.jit_kernels.compile.kernel_cache import KernelCache  # noqa: E402
from kiln.jit_kernels.compile.warmup import Job, jobs_for  # noqa: E402
from kiln.jit_kernels.declare.arch import ALL_ARCHS  # noqa: E402
from kiln.jit_kernels.registry import all_specs, find_spec  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = dict[str, dict[str, Any]]  # job name -> row
ROUNDS = 4  # the same for every program in the record
_COLUMNS = {
    "kernel": "{kernel}",
    "programs": "{programs}",
    "median": "{median:.3f}",
    "slowest": "{slowest:.3f}",
    "bound": "{bound}",
    "the slowest one": "{slowest_one}",
}


def main() -> None:
    """Time all programs, print and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    if unknown := sorted({*(args.kernels or ())} - {*all_specs()}):
        parser.error(f"no kernel is named {', '.join(unknown)}: see kiln kernels list")
    report = Report("compile", "tools/bench_compile.py", load={"rounds": ROUNDS})
    record, old, known = args.output / "compile.json", Rows(), float("inf")
    if args.kernels and record.exists():
        before = json.loads(record.read_text())
        old, known = before["programs"], before["yardstick_seconds"]
        if changes := _changes(before, report):
            parser.error(
                f"{record} is from another machine ({', '.join(changes)} differ): time all "
                "kernels, without --kernels"
            )
    specs = [find_spec(name) for name in args.kernels or all_specs()]
    now, yardstick = _time(jobs_for(specs, ALL_ARCHS))
    programs = {
        job.name: now.get(job.name) or old[job.name]
        for job in jobs_for(all_specs().values(), ALL_ARCHS)
        if job.name in now or job.name in old
    }
    load_average = round(os.getloadavg()[0], 2)
    details = {
        "load_average_at_end": load_average,
        "yardstick_seconds": min(yardstick, known),
        "programs": programs,
    }
    write(replace(report, details=details), args.output)
    print((args.output / "compile.md").read_text())


def _changes(before: Mapping[str, Any], now: Report) -> list[str]:
    """Return the differences between a record's machine and this one, except Kiln's version."""
    here = {**now.hardware, **now.versions}
    recorded = {**before["hardware"], **before["versions"], "kiln": here["kiln"]}
    return [name for name, value in recorded.items() if here.get(name) != value]


def _time(jobs: Sequence[Job]) -> tuple[Rows, float]:
    """Return a row for each job, and the yardstick's seconds."""
    rows: Rows = {}
    yardstick = yardstick_seconds()
    with Progress() as bar:
        task = bar.add_task("compiling", total=ROUNDS * len(jobs))
        for _ in range(ROUNDS):  # over all programs, so that a slow minute affects no single one
            yardstick = min(yardstick, yardstick_seconds())
            for job in jobs:
                start = time.thread_time()
                built = build(job.spec, job.variant, job.arch, KernelCache(Store(None, mode="off")))
                seconds = round(time.thread_time() - start, 4)
                best = rows.get(job.name, {}).get("cpu_seconds", seconds)
                rows[job.name] = {
                    "kernel": job.spec.name,
                    "cpu_seconds": min(best, seconds),
                    "cubin_bytes": len(built.cubin),
                }
                bar.advance(task)
    return rows, round(yardstick, 4)


def write(report: Report, folder: Path) -> None:
    """Write the report, a table of its kernels, and a plot with a dot for each program."""
    kernels = _by_kernel(report)
    programs = report.details["programs"]
    text = report.markdown(
        "Compile time of every program",
        f"CPU seconds, the best of {report.load['rounds']} rounds; {len(programs)} programs.",
        table(_COLUMNS, [_kernel_row(kernel, rows) for kernel, rows in kernels.items()]),
    )
    report.write(folder, "compile", text, plots(report))


def plots(report: Report) -> Plots:
    """Return the plot by the name of its file."""
    return {"compile.png": partial(_draw, _by_kernel(report))}


def _by_kernel(report: Report) -> dict[str, Rows]:
    """Return the programs of each kernel, that with the slowest one first."""
    kernels: dict[str, Rows] = {}
    for name, row in report.details["programs"].items():
        kernels.setdefault(row["kernel"], {})[name] = row
    return dict(sorted(kernels.items(), key=lambda one: -max(_seconds(one[1]))))


def _seconds(rows: Rows) -> list[float]:
    return [row["cpu_seconds"] for row in rows.values()]


def _kernel_row(kernel: str, rows: Rows) -> dict[str, Any]:
    seconds = sorted(_seconds(rows))
    return {
        "kernel": kernel,
        "programs": len(rows),
        "median": seconds[len(rows) // 2],
        "slowest": seconds[-1],
        "bound": find_spec(kernel).max_cpu_seconds,
        "slowest_one": max(rows, key=lambda name: rows[name]["cpu_seconds"]),
    }


def _draw(kernels: dict[str, Rows], figure: Figure) -> None:
    figure.set_size_inches(9, 0.3 * len(kernels) + 1.2)
    axes = figure.subplots()
    for place, (kernel, rows) in enumerate(reversed(kernels.items())):
        dots = {"color": KILN_COLOUR, "alpha": 0.4, "label": "a program"}
        axes.plot(_seconds(rows), [place] * len(rows), "o", **dots)
        bound = find_spec(kernel).max_cpu_seconds
        limit = {"color": ROOF_COLOUR, "linestyle": "", "label": "the kernel's limit"}
        axes.plot(bound, place, "|", markersize=14, **limit)
    axes.set_yticks(range(len(kernels)), list(reversed(kernels)))
    axes.set(xlabel="CPU seconds", xlim=(0, None))
    axes.grid(visible=False, axis="y")
    titled(figure, "CPU seconds to compile each program")
    legend_below(figure, [axes], 2)


if __name__ == "__main__":
    main()
