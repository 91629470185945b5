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
import multiprocessing
import os
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
    parser.add_argument("--seconds", type=float, default=40.0)
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
    context, loud = multiprocessing.get_context("spawn"), list[Read]()
    stop, results = context.Event(), context.Queue()
    # In a process of their own, which does not take the processor from the readers.
    senders = context.Process(target=_send_all, args=(url, args.senders, stop, results))
    senders.start()
    begun = time.perf_counter()
    while time.perf_counter() - begun < args.seconds:
        loud += await read_streams(address, PATH, live)
    stop.set()
    answers: dict[str, list[tuple[int, float]]] = results.get()
    senders.join()
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


def _send_all(url: str, count: int, stop: Any, results: Any) -> None:
    """Send hostile grammars over so many connections until ``stop``; return the answers."""
    os.nice(19)
    answers: dict[str, list[tuple[int, float]]] = {name: [] for name in HOSTILE}

    async def send() -> None:
        await asyncio.gather(*(_send(url, stop, answers) for _ in range(count)))

    asyncio.run(send())
    results.put(answers)


async def _send(url: str, stop: Any, answers: dict[str, list[tuple[int, float]]]) -> None:
    """Send one hostile grammar after the other; others each time, as verdicts are remembered."""
    bodies = {
        name: json.dumps({"prompt": "x", "max_tokens": 20, "structured_outputs": form}).encode()
        for name, form in HOSTILE.items()
    }
    headers = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:
        for number in itertools.count():
            for name, data in bodies.items():
                if stop.is_set():
                    return
                own = data.replace(b"){1000}", b"){%d}" % (1000 + number))
                own = own.replace(b"999", b"%d" % (1000 + number))
                begun = time.perf_counter()
                answer = await client.post(PATH, content=own)
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
