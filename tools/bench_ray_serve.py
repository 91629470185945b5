#!/usr/bin/env python3
"""Measure what faults cost the clients of examples/ray_serve: two replicas of the demo model.

    python3 tools/bench_ray_serve.py [--requests 800] [--clients 8] [--output benchmarks]

Clients ask without pause, each with prompts of its own, half of them for streams. An engine is
killed and stopped, a server and the front are killed; at the end SIGTERM comes while streams are
open. Needs Ray in the Python that runs it (the extra `ray`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from ray_trials.cluster import FLAGS, running  # noqa: E402 - after the path, as all below
from ray_trials.trials import End, strike, terminate  # noqa: E402

from kiln.engine.bench.report import Report, command_line, table  # noqa: E402

FAULTS = ("engine killed", "engine stopped", "server killed", "front killed")
STREAMS = 8
STREAM_TOKENS = 300


def main() -> None:
    """Run all trials on one cluster and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=800, help="whole answers for each fault")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--output", type=Path, help="folder for ray_serve.json and .md")
    args = parser.parse_args()
    trials = []
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log", FLAGS) as cluster:
        for fault in FAULTS:
            trials.append(strike(cluster, fault, args.requests, args.clients))
            print(trials[-1], flush=True)
        end = terminate(cluster, STREAMS, STREAM_TOKENS)
        print(end, flush=True)
    report = Report(
        "ray_serve",
        command_line("tools/bench_ray_serve.py"),
        [one.record() for one in trials],
        load={"clients": args.clients, "requests": args.requests, "flags": list(FLAGS)},
        details={"end": end.record()},
        remark=f"Ray {version('ray')}, a CPU with the demo model, beside other work",
    )
    if args.output is not None:
        page = report.markdown(
            "Faults behind Ray Serve", table(_COLUMNS, report.rows), _sentence(end)
        )
        report.write(args.output, "ray_serve", page)


_COLUMNS = {
    "fault": "{name}",
    "requests": "{requests}",
    "in flight": "{in_flight}",
    "bad": "{bad}",
    "bad, %": "{bad_percent:.2f}",
    "longest pause, s": "{pause:.2f}",
    "whole again, s": "{whole_again:.1f}",
}


def _sentence(end: End) -> str:
    return (
        f"SIGTERM with {end.streams} open streams: {end.finished} finished, exit code "
        f"{end.exit_code}, {end.seconds:.1f} s after the last stream's end; {end.left} processes "
        "left 2 s later.\n\nOf a fault at one of two replicas, the requests that are in flight "
        "there are bad; `in flight` counts those of both. The longest pause is the longest time "
        "without a whole answer."
    )


if __name__ == "__main__":
    main()
