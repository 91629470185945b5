#!/usr/bin/env python3
"""Measure how long rank 0 takes to send a decode step to the other ranks.

    python tools/bench_step_message.py [--output benchmarks]

The followers are processes that decode each message and answer with the time, so that nothing else
is measured. Writes step_message.{json,md}.
"""

from __future__ import annotations

import argparse
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools" / "import_root"))

import numpy as np  # noqa: E402 - after the path, as all below

from kiln.engine.bench.report import Report, command_line, table  # noqa: E402
from kiln.engine.distributed.channel import Channel, Closed, Kind, accept, dial, listen  # noqa: E402
from kiln.engine.graphs.runner import GraphKey  # noqa: E402
from kiln.engine.requests.batch import Batch, ScheduledRequest  # noqa: E402
from kiln.engine.requests.sampling_params import SamplingParams  # noqa: E402
from kiln.engine.runner.rows import Rows, message_room  # noqa: E402
from kiln.engine.runner.step_frame import StepFrame, decode, encode  # noqa: E402

WORLDS, ROWS = (2, 4, 8), (1, 64, 256)
STEPS, WARM_UP = 400, 50
LIMIT_US = 50
_CONTEXT = 1000  # tokens of each request
_TIME = struct.Struct("<q")


def main() -> None:
    """Time every size of a group and of a step; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--child", metavar="ADDRESS", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        follow(args.child)
        return
    rows = [row for world in WORLDS for row in measure(world)]
    columns = {
        "ranks": "{world}", "requests": "{rows}", "bytes": "{bytes}",
        "rank 0, µs": "{send_us:.1f}", "until the last rank has decoded it, µs": "{arrive_us:.1f}",
        "limit": "{limit_us}",
    }  # fmt: skip
    text = (
        f"Medians of {STEPS} messages. Rank 0: encoding and sending to all. The limit is that of "
        "two ranks. With more ranks than cores the followers wait for each other."
    )
    report = Report("step_message", command_line("tools/bench_step_message.py"), rows)
    page = report.markdown("Cost of sending a decode step to the other ranks", text,
                           table(columns, rows))  # fmt: skip
    print(page)
    report.write(args.output, "step_message", page)


def measure(world: int, sizes: tuple[int, ...] = ROWS, steps: int = STEPS) -> list[dict[str, Any]]:
    """Return a row for each number of requests, in a group of ``world`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/ranks"
        with listen(address) as listener:
            command = [sys.executable, __file__, "--child", address]
            children = [subprocess.Popen(command) for _ in range(world - 1)]
            channels = [accept(listener) for _ in children]
        try:
            return [_row(channels, rows, steps) for rows in sizes]
        finally:
            for channel in channels:
                channel.close()
            for child in children:
                child.wait(10)


def follow(address: str) -> None:
    """Decode messages and answer with the time, which is that of all processes, until the end."""
    channel = dial(address)
    while True:
        try:
            _, content = channel.receive()
            decode(content)
            channel.send(Kind.REPLY, _TIME.pack(time.monotonic_ns()))
        except Closed:
            return


def decode_step(rows: int) -> StepFrame:
    """Return a decode step as rank 0 has it: each request computes the token it sampled last."""
    batch = Batch(tuple(
        ScheduledRequest(
            request_id=f"r{row}", row=row, num_tokens=1, num_computed_tokens=_CONTEXT,
            token_ids=[], num_blocks=_CONTEXT // 16 + 1, new_block_ids=[row] if row % 16 else [],
            num_samples=1, num_output_tokens=1, params=SamplingParams(temperature=0), seed=row,
            is_plain=True,
        )
        for row in range(rows)
    ))  # fmt: skip
    message = np.zeros(message_room(rows, rows, _CONTEXT // 16 + 1), np.int32)
    words = Rows(rows).write(batch, message)
    return StepFrame(batch, GraphKey(rows, rows, True), message[:words])


def _row(channels: list[Channel], rows: int, steps: int) -> dict[str, Any]:
    frame = decode_step(rows)
    sent, arrived = [], []
    for _ in range(WARM_UP + steps):
        begun = time.monotonic_ns()
        content = encode(frame)
        for channel in channels:
            channel.send(Kind.STEP, content)
        sent.append(time.monotonic_ns() - begun)
        replies = [_TIME.unpack(channel.receive()[1])[0] for channel in channels]
        arrived.append(max(replies) - begun)
    return {
        "world": len(channels) + 1,
        "rows": rows,
        "bytes": len(content),
        "send_us": statistics.median(sent[WARM_UP:]) / 1000,
        "arrive_us": statistics.median(arrived[WARM_UP:]) / 1000,
        "limit_us": LIMIT_US,
    }


if __name__ == "__main__":
    main()
