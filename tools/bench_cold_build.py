#!/usr/bin/env python3
"""Compare cold builds of the same kernels by NVRTC and by the build methods of other engines.

    python tools/bench_cold_build.py --install-tvm-ffi

Each way builds one program (a kernel for one type and one target) from the same template:

- nvrtc         Kiln's own: template to cubin in a running process
- nvcc-cubin    nvcc -cubin
- nvcc-so       nvcc -shared, with a launcher of plain C beside the kernel
- tvm-ffi-so    nvcc and link, with a launcher that takes tvm-ffi tensors
- torch-so      nvcc, g++ and link, as torch.utils.cpp_extension.load_inline lays it out: a launcher
                that takes torch tensors, and a binding to Python

Equal: template, headers, target, C++17, the compiler's default optimisation level. Not equal: nvcc
always reads its own runtime header. nvcc and NVRTC should have the same release, as after `pip
install nvidia-cuda-nvcc nvidia-cuda-runtime` with its bin folder in PATH. nvcc reads a copy of the
headers in which ptx.cuh uses the device side and the integers of <cstdint>. The `.so` builds run
as plain commands, without the overhead of ninja, torch.utils.cpp_extension and tvm_ffi.cpp. Each
round is a fresh process; NVRTC's loading time is divided among the programs of a round. An empty
kernel measures the fixed cost of each way.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from cold_build import report  # noqa: E402 - after the path, as all below
from cold_build.sources import KERNELS, Program, programs_of  # noqa: E402
from cold_build.ways import Seconds, Way, find_ways  # noqa: E402

from kiln.engine.bench.machine import versions  # noqa: E402
from kiln.engine.bench.report import Report, command_line  # noqa: E402

Round = tuple[list[Seconds], Seconds | None]  # for each program; for an empty kernel


def main() -> int:
    """Build, print and write; return 1 when a build failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="rounds, except for the two slowest")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, metavar="NAME")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument(
        "--install-tvm-ffi",
        action="store_true",
        help="pip install apache-tvm-ffi into a throwaway environment",
    )
    args = parser.parse_args()
    programs = programs_of(args.kernels)
    with tempfile.TemporaryDirectory(prefix="kiln-cold-build-") as name:
        ways, absent = find_ways(Path(name), args.arch, programs, args.install_tvm_ffi)
        rounds: dict[str, list[Round]] = {}
        for number in range(args.rounds):  # the ways alternate, so that a slow minute affects all
            for way in ways:
                if way.name in absent or number >= way.most_rounds:
                    continue
                try:
                    rounds.setdefault(way.name, []).append(_measure(way, number))
                except subprocess.CalledProcessError as error:
                    absent[way.name] = f"the build failed: {error}"
                    rounds.pop(way.name, None)
            measured = [way for way in ways if way.name in rounds]
            rows = [_row(way, rounds[way.name], rounds["nvrtc"]) for way in measured]
            _write(args, rows, _by_program(programs, rounds), absent)
    print((args.output / "cold_build.md").read_text())
    return 0 if len(rounds) == len(ways) else 1


def _write(
    args: argparse.Namespace,
    rows: list[dict[str, Any]],
    by_program: list[dict[str, Any]],
    absent: dict[str, str],
) -> None:
    """Write the results so far: a round takes minutes."""
    average = round(os.getloadavg()[0], 2)
    details = {"load_average_at_end": average, "not_measured": absent, "programs": by_program}
    load = {"arch": args.arch, "kernels": list(args.kernels), "rounds": args.rounds}
    command, found = command_line("tools/bench_cold_build.py"), versions() | {"nvcc": _nvcc()}
    report.write(Report("cold_build", command, rows, load, details, versions=found), args.output)


def _nvcc() -> str:
    if shutil.which("nvcc") is None:
        return "absent"
    lines = subprocess.check_output(["nvcc", "--version"], text=True).splitlines()
    return next((line for line in lines if "release" in line), lines[-1]).strip()


def _measure(way: Way, number: int) -> Round:
    done = way.run(way, number)
    print(f"{way.name}: {_mean(done)[0]:.3f} s a program, {_mean(done)[1]:.3f} s CPU", flush=True)
    return done


def _mean(done: Round) -> Seconds:
    """Return the mean (wall, CPU) seconds of a program in one round."""
    wall, spent = (statistics.mean(column) for column in zip(*done[0], strict=True))
    return wall, spent


def _medians(seconds: Iterable[Seconds]) -> Seconds:
    wall, spent = (statistics.median(column) for column in zip(*seconds, strict=True))
    return wall, spent


def _by_program(
    programs: Sequence[Program], rounds: dict[str, list[Round]]
) -> list[dict[str, Any]]:
    """Return the CPU seconds of each program that both NVRTC and nvcc -cubin built."""
    if "nvcc-cubin" not in rounds:
        return []
    rows = []
    for index, program in enumerate(programs):
        ours, theirs = (
            _medians(done[0][index] for done in rounds[way])[1] for way in ("nvrtc", "nvcc-cubin")
        )
        rows.append(
            {
                "program": program.label,
                "nvrtc_cpu_seconds": round(ours, 4),
                "nvcc_cubin_cpu_seconds": round(theirs, 4),
                "times_nvrtc_cpu": round(theirs / ours, 1),
            }
        )
    return rows


def _row(way: Way, rounds: list[Round], ours: list[Round]) -> dict[str, Any]:
    wall, spent = _medians(map(_mean, rounds))
    own_wall, own_spent = _medians(map(_mean, ours[: len(rounds)]))  # of the same rounds
    empty = [done[1] for done in rounds if done[1] is not None]
    return {
        "way": way.name,
        "what": way.what,
        "wall_seconds": round(wall, 4),
        "cpu_seconds": round(spent, 4),
        "times_nvrtc_wall": round(wall / own_wall, 1),
        "times_nvrtc_cpu": round(spent / own_spent, 1),
        "artefact_bytes": way.artefact_bytes(),
        "empty_kernel_cpu_seconds": round(_medians(empty)[1], 4) if empty else None,
        "rounds": [[round(number, 4) for number in _mean(one)] for one in rounds],
    }


if __name__ == "__main__":
    raise SystemExit(main())
