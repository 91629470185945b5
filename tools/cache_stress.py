#!/usr/bin/env python3
"""Stress the kernel cache: try to make it serve a wrong byte.

    python tools/cache_stress.py kill --seconds 600     workers killed while they warm one cache
    python tools/cache_stress.py kill --nvrtc           … with real builds (needs NVRTC)
    python tools/cache_stress.py flips --full           every bit of three real entries
    python tools/cache_stress.py nfs --seconds 60       two nodes on simulated NFS
    python tools/cache_stress.py lookup                 time of a warm lookup

Prints one JSON object and exits with 1 on an error. ``--output FILE`` adds the result to a JSON
file under the subcommand's name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from cache_trials import flips, kills, lookups, nfs  # noqa: E402 - after the path, as below
from cache_trials.processes import Child  # noqa: E402

from kiln.cache.keys import content_key  # noqa: E402
from kiln.engine.bench.machine import hardware  # noqa: E402
from kiln.engine.bench.report import Report, command_line, write_json  # noqa: E402


def main() -> int:
    """Run one trial; return 1 on an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="trial", required=True)
    kill = commands.add_parser("kill", help="SIGKILL at random, and at each call of a publisher")
    kill.add_argument("--nvrtc", action="store_true", help="build real kernels")
    kill.add_argument("--pause", type=float, default=0.04, help="mean seconds between kills")
    kill.add_argument("--min-kills", type=int, default=1, help="fail on fewer kills")
    flip = commands.add_parser("flips", help="damaged and wrongly combined entries")
    flip.add_argument("--full", action="store_true", help="every bit, not one in 50")
    network = commands.add_parser("nfs", help="two nodes with separate NFS client caches")
    network.add_argument("--min-stale", type=int, default=1, help="stale answers that must occur")
    lookup = commands.add_parser("lookup", help="microseconds, from the page cache")
    for command in (kill, network):
        command.add_argument("--seconds", type=float, default=60.0)
    for command in (kill, flip, network, lookup):
        command.add_argument("--folder", type=Path, help="work here (default: a new one)")
        command.add_argument("--output", type=Path, help="add the result to this JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kiln-stress-", dir=args.folder) as folder:
        trials = {"kill": _kill, "flips": _flips, "nfs": _nfs, "lookup": _lookup}
        result = trials[args.trial](args, Path(folder))
    result["load_average_of_15_minutes"] = round(os.getloadavg()[2], 1)  # includes this trial
    report = Report(
        "cache_stress",
        command_line("tools/cache_stress.py"),
        details=result,
        hardware=hardware() | _system(),
    ).to_json()
    print(json.dumps(report, indent=1))
    if args.output:
        _file(args.output, args, report)
    return 0 if result["passed"] else 1


def _kill(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    programs = _nvrtc_programs() if args.nvrtc else kills.stand_ins(64)
    locks = folder / "locks"
    locks.mkdir(mode=0o700)
    steps = kills.kill_at_each_call(folder / "steps")
    result = kills.random_kills(
        folder / "cache", locks, programs, seconds=args.seconds, pause=args.pause
    )
    wrong = (
        *(steps[name] for name in ("wrong", "unswept", "unpublished")),
        *(result[name] for name in kills.MUST_BE_ZERO),
    )
    passed = not any(wrong) and result["kills"] >= args.min_kills and result["passes"] > 0
    return {"passed": passed, "at_each_call": steps, **result}


def _flips(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = flips.run(1.0 if args.full else 0.02)
    believed = sum(result[f"{name}_believed"] for name in ("flips", "truncations", "swaps"))
    return {"passed": believed == 0, **result}


def _nfs(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = nfs.two_nodes(folder, seconds=args.seconds, min_stale=args.min_stale)
    return {"passed": nfs.passed(result), **result}


def _lookup(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    result = lookups.measure(folder / "kernels", rounds=100)
    return {"passed": result["best_median_us"] <= 50, **result}


_FAMILIES = ("activation", "norm", "rotary")  # a worker must build all between two wipes


def _nvrtc_programs() -> list[kills.Program]:
    """Compile small kernels for reference, in a child: NVRTC must not be loaded before a fork."""
    from kiln.jit_kernels.declare.spec import label
    from kiln.jit_kernels.registry import all_specs
    from kiln.jit_kernels.toolchains.template import render

    builds = {
        label(spec, variant): partial(_compile, label(spec, variant), render(spec, variant))
        for spec in all_specs().values()
        if spec.family in _FAMILIES
        for variant in spec.variants()
    }
    reference = Child(
        lambda: {name: hashlib.sha256(build()).hexdigest() for name, build in builds.items()}
    ).result()
    return [
        kills.Program(content_key([("name", name.encode())]), reference[name], build)
        for name, build in builds.items()
    ]


def _compile(name: str, unit: Any) -> bytes:
    from kiln.jit_kernels.toolchains import nvrtc

    return nvrtc.compile_cubin(name, unit, kills.ARCH)


def _file(path: Path, args: argparse.Namespace, report: dict[str, Any]) -> None:
    words = [args.trial, "nvrtc" if getattr(args, "nvrtc", False) else ""]
    if hasattr(args, "seconds"):
        words.append(f"{args.seconds:g} s")
    results = json.loads(path.read_text()) if path.exists() else {}
    results[" ".join(filter(None, words))] = report
    write_json(path, results)


def _system() -> dict[str, str]:
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    return {
        "system": f"Linux {platform.release().partition('-')[0]}",
        "root_file_system": next((m[2] for m in mounts if m[1] == "/"), "unknown"),
    }


if __name__ == "__main__":
    sys.exit(main())
