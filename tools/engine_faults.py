#!/usr/bin/env python3
"""Try a server's life: an engine that dies or freezes, saturation, memory, clients that leave.

    python tools/engine_faults.py TRIAL… [--engine stub|demo|llama3-8b|…] [--output benchmarks]

kill          50 SIGKILLs of the engine under load: each client is told, nothing is left
stop          50 SIGSTOPs, the same
saturation    30 minutes of more requests than the queue takes: no false alarm
requests      1,000,000 requests: both processes keep their memory
disconnects   500 clients that leave at random moments × 20 seeds: nothing is held

Each trial starts a server of its own on loopback. ``stub`` computes nothing, ``demo`` is the demo
model on a CPU; the name of a shape, for kill and stop, is that model with random weights. A trial
replaces its own row in engine_faults.{json,md}, so they may run one by one.
The exit code is 1 if a trial has found a fault.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from fault_trials import trials  # noqa: E402 - after the path, as all below
from fault_trials.trials import Advance, Row  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from kiln.engine.bench.report import Report, command_line, table  # noqa: E402
from kiln.engine.bench.shapes import SHAPES  # noqa: E402

TRIALS = ("kill", "stop", "saturation", "requests", "disconnects")
_COLUMNS = {
    "trial": "{trial}", "engine": "{engine}", "clients": "{clients}", "requests": "{requests:,}",
    "refused": "{refused:,}", "told after, mean, s": "{told_mean_s:.2f}",
    "at most": "{told_max_s:.2f}", "back after at most, s": "{back_max_s:.1f}",
    "slowest probe, s": "{probe_max_s:.2f}", "API process, bytes": "{growth_bytes:+,}",
    "engine, bytes": "{engine_growth_bytes:+,}", "descriptors": "{descriptors:+}",
    "threads": "{threads:+}", "took, s": "{seconds:.0f}", "faults": "{num_faults}",
}  # fmt: skip


def main() -> int:
    """Run the trials; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trials", nargs="+", choices=TRIALS, metavar="TRIAL")
    parser.add_argument("--engine", choices=("stub", "demo", *SHAPES), default="stub")
    parser.add_argument("--tp", type=int, default=1, help="ranks, for kill and stop")
    parser.add_argument("--ends", type=int, default=50, help="of the engine, by kill and by stop")
    parser.add_argument("--minutes", type=float, default=30.0, help="of saturation")
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--disconnects", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=20, help="of the disconnects")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    rows = _known(args.output)
    faults = 0
    for name in args.trials:
        row = _run(name, args)
        rows[row["trial"], row["engine"]] = row
        faults += len(row["faults"])
        for fault in row["faults"][:20]:
            print(f"{row['trial']}: {fault}", file=sys.stderr)
        _write(args.output, list(rows.values()))
    return 1 if faults else 0


def _run(name: str, args: argparse.Namespace) -> Row:
    """Run a trial, with a progress bar of its units."""
    units = {
        "kill": args.ends, "stop": args.ends, "saturation": round(60 * args.minutes),
        "requests": args.requests, "disconnects": args.disconnects * args.seeds,
    }  # fmt: skip
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(f"{name}, {args.engine}", total=units[name])
        begun = time.monotonic()
        row = asyncio.run(_trial(name, args, partial(bar.advance, task)))
    return {**row, "num_faults": len(row["faults"]), "seconds": time.monotonic() - begun}


def _trial(name: str, args: argparse.Namespace, advance: Advance) -> Coroutine[None, None, Row]:
    if name == "saturation":
        return trials.saturation(args.engine, 60 * args.minutes, advance)
    if name == "requests":
        return trials.requests(args.engine, args.requests, advance)
    if name == "disconnects":
        return trials.disconnects(args.engine, args.disconnects, args.seeds, advance)
    how = signal.SIGKILL if name == "kill" else signal.SIGSTOP
    return trials.deaths(args.engine, how, args.ends, advance, ranks=args.tp)


def _known(folder: Path) -> dict[tuple[str, str], Row]:
    """Return the rows that earlier runs have written."""
    path = folder / "engine_faults.json"
    if not path.exists():
        return {}
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {(row["trial"], row["engine"]): row for row in rows}


def _write(folder: Path, rows: list[Row]) -> None:
    report = Report("engine_faults", command_line("tools/engine_faults.py"), rows)
    page = report.markdown(
        "Faults of the engine under load",
        "Each client sends its next request when the one before has ended; server and clients run "
        'on one machine. "Told after" is the time from the signal that hits the engine until a '
        'client has its error; the limit is 5 s. "Back after" is the time from the signal until '
        'a request is answered again; it includes the wait of 1 s before a restart. "Bytes" is '
        "by how much the memory of a process grew (RssAnon + VmSwap); the limit is 5 MB for "
        "1,000,000 requests. The stub engine computes nothing.",
        table(_COLUMNS, rows),
        "\n".join(f"- {row['trial']}: {fault}" for row in rows for fault in row["faults"][:5]),
    )
    print(page)
    report.write(folder, "engine_faults", page)


if __name__ == "__main__":
    sys.exit(main())
