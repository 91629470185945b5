#!/usr/bin/env python3
"""Build the same kernels cold by NVRTC and by the ways of other engines, side by side.

    python tools/bench_cold_build.py --install-tvm-ffi

The ways, each a build of one kernel (bf16, one target) from the same template:

- nvrtc         Kiln's own: template to cubin in a running process
- nvcc-cubin    nvcc -cubin
- nvcc-so       nvcc -shared, with a launcher of plain C beside the kernel
- tvm-ffi-so    nvcc and link, with a launcher that takes tvm-ffi tensors
- torch-so      nvcc, g++ and link, as torch.utils.cpp_extension.load_inline lays it out: a launcher
                that takes torch tensors, and a binding to Python

What is equal: template, headers, target, C++17, the compiler's own optimisation level. What is
not, and cannot be: nvcc always reads its own runtime header, and its version may differ from
NVRTC's. nvcc reads a copy of our headers in which ptx.cuh takes the device side and <cstdint>'s
integers. The `.so` builds are called as plain commands: no ninja, no Python around them, so what
torch.utils.cpp_extension and tvm_ffi.cpp add to them is left out. NVRTC's time includes loading
it, shared between the kernels of a round: each round is a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from cold_build.report import write_plot, write_table  # noqa: E402
from cold_build.sources import KERNELS  # noqa: E402
from cold_build.ways import Way, find_ways  # noqa: E402 - after the path, as all below
from machine import PACKAGES, machine  # noqa: E402


def main() -> int:
    """Build, print and write; return 1 when a build failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each way but the slowest")
    parser.add_argument("--arch", default="sm_90a")
    parser.add_argument("--kernels", nargs="+", default=KERNELS, metavar="NAME")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument(
        "--install-tvm-ffi",
        action="store_true",
        help="pip install apache-tvm-ffi into a throwaway environment",
    )
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kiln-cold-build-") as name:
        ways, absent = find_ways(Path(name), args.arch, args.kernels, args.install_tvm_ffi)
        rounds: dict[str, list[tuple[float, float]]] = {}
        for number in range(args.rounds):  # the ways take turns, so that a slow minute hits all
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
            _write(args, rows, absent)
    print((args.output / "cold_build.md").read_text())
    return 0 if len(rounds) == len(ways) else 1


def _write(args: argparse.Namespace, rows: list[dict[str, Any]], absent: dict[str, str]) -> None:
    """Write what is measured so far: a round takes minutes."""
    result = {
        "command": f"tools/bench_cold_build.py {' '.join(sys.argv[1:])}",
        "machine": machine(PACKAGES),
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "arch": args.arch,
        "kernels": list(args.kernels),
        "rounds": args.rounds,
        "not_measured": absent,
        "ways": rows,
    }
    (args.output / "cold_build.json").write_text(json.dumps(result, indent=1) + "\n")
    write_table(result, args.output / "cold_build.md")
    write_plot(result, args.output / "cold_build.png")


def _measure(way: Way, number: int) -> tuple[float, float]:
    """Return (wall, CPU) seconds of a kernel in one round, the mean over the kernels."""
    wall, spent = way.build_all(number)
    print(f"{way.name}: {wall:.3f} s a kernel, {spent:.3f} s CPU", flush=True)
    return wall, spent


def _row(
    way: Way, rounds: list[tuple[float, float]], ours: list[tuple[float, float]]
) -> dict[str, Any]:
    wall, spent = (statistics.median(column) for column in zip(*rounds, strict=True))
    own_wall, own_spent = (statistics.median(column) for column in zip(*ours, strict=True))
    return {
        "way": way.name,
        "what": way.what,
        "wall_seconds": round(wall, 4),
        "cpu_seconds": round(spent, 4),
        "times_nvrtc_wall": round(wall / own_wall, 1),
        "times_nvrtc_cpu": round(spent / own_spent, 1),
        "artefact_bytes": way.artefact_bytes(),
        "rounds": [[round(number, 4) for number in one] for one in rounds],
    }


if __name__ == "__main__":
    raise SystemExit(main())
