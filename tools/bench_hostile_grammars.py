#!/usr/bin/env python3
"""Measure what hostile grammars do to live streams, and how soon they are refused.

    python tools/bench_hostile_grammars.py [--live 8] [--senders 4] [--output benchmarks]

A real server of the demo model streams to some readers, alone, and then beside clients that send
one hostile grammar after the other. Writes hostile_grammars.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

import httpx  # noqa: E402 - after the path, as all below
from api_process.readers import Read, read_streams  # noqa: E402

from kiln.engine.bench.report import Report, Row, command_line, table  # noqa: E402
from kiln.engine.cli.local_server import local_server  # noqa: E402

DEMO, PATH = ROOT / "engine" / "demo", "/v1/completions"


def _nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


HOSTILE: dict[str, dict[str, Any]] = {
    "enum of 100,000": {"json": {"enum": [f"value {index}" for index in range(100_000)]}},
    "nesting of 10,000": {"json": _nested(10_000)},
    "2^20 alternatives": {"json": {"anyOf": [{"$ref": "#/$defs/d0"}], "$defs": {
        **{f"d{i}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(20)},
        "d20": {"type": "string", "pattern": "^(a|b)*a(a|b){20}$"},
    }}},
    "alternatives in Lark": {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(11_000))},
    "counted twice": {"regex": "(a{1000}){1000}"},
    "ambiguous": {"regex": "(a|aa|aaa){500}b"},
    "multipleOf": {"json": {"type": "integer", "multipleOf": 99_999_999}},
    "schema of 3 MB": {"json": {"description": "x" * 3_000_000}},
    "body of 10 MB": {"json": {"description": "x" * 10_000_000}},
}  # fmt: skip


def main() -> None:
    """Measure; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--live", type=int, default=8)
    parser.add_argument("--senders", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400, help="of each live stream")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    with local_server([str(DEMO), "--device", "cpu"], 120) as (url, _):
        gaps, rows = asyncio.run(_measure(url, args))
    report = Report("hostile_grammars", command_line("tools/bench_hostile_grammars.py"), rows,
                    details={"gaps": gaps})  # fmt: skip
    columns = {"grammar": "{grammar}", "sent": "{sent}", "status": "{status}",
               "longest, s": "{longest_s:.2f}"}  # fmt: skip
    page = report.markdown(
        "Hostile grammars beside live streams",
        f"{args.live} streams of the demo model, gaps between tokens in ms: alone p50 "
        f"{gaps['quiet_p50']:.1f}, p99 {gaps['quiet_p99']:.1f}; beside {args.senders} clients that "
        f"send hostile grammars p50 {gaps['hostile_p50']:.1f}, p99 {gaps['hostile_p99']:.1f}.",
        table(columns, rows),
    )
    print(page)
    report.write(args.output, "hostile_grammars", page)


async def _measure(url: str, args: argparse.Namespace) -> tuple[dict[str, float], list[Row]]:
    place = urlsplit(url)
    address = (str(place.hostname), int(place.port or 0))
    body = {"prompt": "Once", "stream": True, "ignore_eos": True, "max_tokens": args.tokens}
    live = [{**body, "seed": seed} for seed in range(args.live)]
    await read_streams(address, PATH, live)
    quiet = _percentiles(await read_streams(address, PATH, live))
    answers: dict[str, list[tuple[int, float]]] = {name: [] for name in HOSTILE}
    senders = [asyncio.create_task(_send(url, answers)) for _ in range(args.senders)]
    loud = []
    while not all(answers.values()):
        loud += await read_streams(address, PATH, live)
    for sender in senders:
        sender.cancel()
    await asyncio.gather(*senders, return_exceptions=True)
    hostile = _percentiles(loud)
    rows = [
        {
            "grammar": name, "sent": len(own), "longest_s": max(seconds for _, seconds in own),
            "status": ", ".join(map(str, sorted({status for status, _ in own}))),
        }
        for name, own in answers.items()
    ]  # fmt: skip
    return {
        "quiet_p50": quiet[49], "quiet_p99": quiet[98],
        "hostile_p50": hostile[49], "hostile_p99": hostile[98],
    }, rows  # fmt: skip


async def _send(url: str, answers: dict[str, list[tuple[int, float]]]) -> None:
    """Send one hostile grammar after the other; others each time, as verdicts are remembered."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number in itertools.count():
            for name, form in HOSTILE.items():
                other = {"regex": form["regex"] + f"|{number}"} if "regex" in form else form
                body = {"prompt": "x", "max_tokens": 20, "structured_outputs": other}
                data = json.dumps(body)
                begun = time.perf_counter()
                answer = await client.post(
                    PATH, content=data, headers={"content-type": "application/json"}
                )
                answers[name].append((answer.status_code, time.perf_counter() - begun))


def _percentiles(reads: list[Read]) -> list[float]:
    """Return the percentiles of the times between bytes of a stream, in milliseconds."""
    assert all(read.is_complete for read in reads), reads[0]
    gaps = [
        1000 * (late - early)
        for read in reads
        for early, late in itertools.pairwise(read.times[1:])
    ]
    return statistics.quantiles(gaps, n=100)


if __name__ == "__main__":
    main()
