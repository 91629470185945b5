#!/usr/bin/env python3
"""Measure the CPU time of the API process per streamed token.

    python tools/bench_api_process.py [--streams 256] [--output benchmarks]

The server, its boundary to the engine process and its tokenizer, the demo model's byte-level BPE,
are the real ones; the engine process computes nothing and emits one token for each stream at a
fixed pace. Readers on raw sockets count events in a third process. Two loads differ only in the
tokens of each stream, and so in the CPU time that these take of the API process. At a step of 20 ms
it keeps up, so that a token is an event; at 5 ms it must join tokens.

Then the gaps between the events of 16 streams, alone and beside sockets that send nothing and
streams that nobody reads. Writes api_process.{json,md}.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

from api_process.engine import command  # noqa: E402 - after the path, as all below
from api_process.readers import Read, hostile_clients, read_streams  # noqa: E402

from kiln.engine.bench.report import Report, Row, command_line, table  # noqa: E402
from kiln.engine.cli.local_server import local_server  # noqa: E402

DEMO = ROOT / "engine" / "demo"
TEMPLATE = "{{ tools | tojson }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
AGENT = ("--reasoning-parser", "qwen3", "--tool-call-parser", "hermes", "--chat-template", TEMPLATE)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
LIMIT_US = 25
ROUNDS = 3  # of which the least CPU time counts: other work on a machine only adds to it
LIVE, SILENT, STALLED = 16, 200, 64
HOSTILE_STEP_MS = 20.0
_WARM_UP = 8  # tokens
_SETTLE = 0.3  # seconds for the connections to be closed
_MESSAGES = [{"role": "user", "content": "What is 17 + 25?"}]
_WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def main() -> None:
    """Measure every case; write JSON and tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, nargs="+", default=[20.0, 5.0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    rows = [
        {"case": name, **measure(name, args.streams, args.tokens, step)}
        for name in args.cases
        for step in args.step_ms
    ]
    gaps = [hostile(args.tokens)]
    load = {"streams": args.streams, "tokens": args.tokens}
    report = Report("api_process", command_line("tools/bench_api_process.py"), rows, load,
                    {"hostile": gaps})  # fmt: skip
    page = report.markdown(
        "CPU time of the API process",
        f"{args.streams} streams of {args.tokens} tokens, all begun at once; the least of {ROUNDS} "
        "rounds.",
        table(_COLUMNS, rows),
        f"Gaps between the events of {LIVE} streams, alone and beside {SILENT} silent sockets and "
        f"{STALLED} streams that nobody reads, in ms. A step takes {HOSTILE_STEP_MS:g} ms.",
        table(_GAP_COLUMNS, gaps),
    )
    print(page)
    report.write(args.output, "api_process", page)


_COLUMNS = {
    "": "{case}",
    "step, ms": "{step_ms:g}",
    "µs of CPU a token": "{token_us:.1f}",
    "limit": "{limit_us}",
    "tokens an event": "{tokens_an_event:.2f}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "ms of CPU a request beside": "{request_ms:.2f}",
}
_GAP_COLUMNS = {
    "alone, median": "{quiet_median_ms:.1f}",
    "alone, p99": "{quiet_p99_ms:.1f}",
    "beside them, median": "{hostile_median_ms:.1f}",
    "beside them, p99": "{hostile_p99_ms:.1f}",
    "limit": "{limit_ms:.1f}",
}
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "chat": (CHAT, {"messages": _MESSAGES}, ()),
    "chat, reasoning and tools read": (CHAT, {"messages": _MESSAGES, "tools": [_WEATHER]}, AGENT),
    "completions": (TEXT, {"prompt": "Once"}, ()),
}


def measure(case: str, streams: int, tokens: int, step_ms: float) -> Row:
    """Return the row of one case: two loads differ only in their tokens, and so in what these cost.

    Raises AssertionError if a stream was not read to its end.
    """
    path, fields, flags = CASES[case]
    body = {**fields, "stream": True, "temperature": 0}
    program = command("serve", step_ms / 1000)
    flags = (*flags, "--device", "cpu", "--max-waiting", str(2 * streams))
    with local_server([str(DEMO), *flags], 60, program) as (url, server):
        place = urlsplit(url)
        address = (str(place.hostname), int(place.port or 0))

        def load(count: int) -> tuple[float, list[Read]]:  # seconds of CPU, and what came
            before = cpu_seconds(server.pid)
            reads = asyncio.run(
                read_streams(address, path, [{**body, "max_tokens": count}] * streams)
            )
            assert all(read.is_complete for read in reads), reads[0]
            time.sleep(_SETTLE)
            return cpu_seconds(server.pid) - before, reads

        load(_WARM_UP)
        few = max(1, tokens // 4)
        short, long = (min(load(count) for _ in range(ROUNDS)) for count in (few, tokens))
    per_token = (long[0] - short[0]) / (streams * (tokens - few))
    begun, ended = min(read.times[0] for read in long[1]), max(read.times[-1] for read in long[1])
    return {
        "step_ms": step_ms,
        "limit_us": LIMIT_US,
        "token_us": 1e6 * per_token,
        "request_ms": 1e3 * (short[0] / streams - few * per_token),
        "tokens_an_event": streams * tokens / sum(read.events for read in long[1]),
        "tokens_per_s": streams * tokens / (ended - begun),
    }


def hostile(tokens: int) -> Row:
    """Return the gaps between the events of live streams, alone and beside hostile clients."""
    body = {"messages": _MESSAGES, "stream": True, "temperature": 0, "max_tokens": tokens}
    flags = ("--device", "cpu", "--max-waiting", str(2 * (LIVE + STALLED)))
    with local_server([str(DEMO), *flags], 60, command("serve", HOSTILE_STEP_MS / 1000)) as (
        url,
        _,
    ):
        place = urlsplit(url)
        address = (str(place.hostname), int(place.port or 0))

        async def beside() -> list[Read]:
            async with hostile_clients(address, SILENT, CHAT, [body] * STALLED):
                return await read_streams(address, CHAT, [body] * LIVE)

        asyncio.run(read_streams(address, CHAT, [{**body, "max_tokens": _WARM_UP}]))
        quiet = _gaps(asyncio.run(read_streams(address, CHAT, [body] * LIVE)))
        loud = _gaps(asyncio.run(beside()))
    return {
        "quiet_median_ms": quiet[49], "quiet_p99_ms": quiet[98], "limit_ms": 2 * quiet[98],
        "hostile_median_ms": loud[49], "hostile_p99_ms": loud[98],
    }  # fmt: skip


def _gaps(reads: list[Read]) -> list[float]:
    """Return the percentiles of the times between bytes of a stream, in milliseconds."""
    assert all(read.is_complete for read in reads), reads[0]
    gaps = [
        1000 * (late - early)
        for read in reads
        for early, late in itertools.pairwise(read.times[1:])
    ]
    return statistics.quantiles(gaps, n=100)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far, of all its threads, in the kernel too.

    Source: proc_pid_stat(5), utime and stime.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
