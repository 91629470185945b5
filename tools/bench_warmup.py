#!/usr/bin/env python3
"""Time ``kiln warmup --arch all`` on this machine, cold and warm; write benchmarks/warmup.json.

    python tools/bench_warmup.py

Each run is a new process with a new cache. "seconds" is the time that the command reports for the
kernels, "process_seconds" that of the whole command with its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from kiln.engine.bench.report import Report  # noqa: E402 - after the path

COMMAND = ("warmup", "--arch", "all", "--json")


def main() -> None:
    """Run the command, print and write the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for kind in runs:
                runs[kind].append(_run(folder))
                print(kind, runs[kind][-1], flush=True)
    best = {kind: min(rows, key=lambda row: row["seconds"]) for kind, rows in runs.items()}
    load_average = round(os.getloadavg()[0], 2)
    details = {"load_average_at_end": load_average, "limit_seconds": 60, "best": best, "runs": runs}
    report = Report("warmup", shlex.join(["kiln", *COMMAND]), details=details)
    print(f"wrote {report.write(args.output, 'warmup')[0]}")


def _run(folder: str) -> dict[str, Any]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    out = subprocess.check_output(
        [sys.executable, "-m", "kiln.engine.cli.main", *COMMAND],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "tools" / "import_root"),
            "KILN_KERNEL_CACHE_DIR": folder,
        },
    )
    elapsed = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row: dict[str, Any] = json.loads(out)
    return row | {"process_seconds": round(elapsed, 2), "process_cpu_seconds": round(spent, 2)}


if __name__ == "__main__":
    main()
