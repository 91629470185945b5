"""Run gpu_check's sections in child processes, so that a crash still gives a result."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gpu.parts import longest_first
from gpu.room import Room, free_gib, num_cores
from gpu.sections import ALL as SECTIONS
from gpu.sections import WHOLE, WHOLE_PART, WHOLE_SEVERAL

_SCRIPT = Path(__file__).resolve().parents[1] / "gpu_check.py"
_LEAST_SECONDS = 5  # minimum time left to start a section
_LATE = "not done in time"
Result = dict[str, Any]


def run_all(names: Sequence[str], args: argparse.Namespace) -> Iterator[tuple[str, Result]]:
    """Yield each section's name and result as it ends.

    First those that may run at once, the longest first, as far as the GPU's memory and the cores
    allow; then those that time something, each alone.
    """
    begun, room = time.perf_counter(), Room(free_gib(), num_cores())

    def run(name: str) -> Result:
        start = time.perf_counter()
        print(f"== {name}\n", end="", flush=True)  # one write, because other threads print too
        result = run_section(name, args, _whole(args) - (start - begun), room)
        return result | {"seconds": round(time.perf_counter() - start, 1)}

    waiting = longest_first([name for name in names if SECTIONS[name].beside_others])
    alone = [name for name in names if name not in waiting]
    with ThreadPoolExecutor(max(len(waiting), 1)) as pool:
        running: dict[Future[Result], str] = {}
        while waiting or running:
            for name in [*waiting]:
                if room.start(name, SECTIONS[name]):
                    waiting.remove(name)
                    running[pool.submit(run, name)] = name
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                name = running.pop(done)
                room.end(name)
                yield name, done.result()
    for name in alone:
        yield name, run(name)


def _whole(args: argparse.Namespace) -> int:
    if getattr(args, "part", None):
        return WHOLE_PART
    return WHOLE if getattr(args, "gpus", 1) == 1 else WHOLE_SEVERAL


def run_section(name: str, args: argparse.Namespace, seconds_left: float, room: Room) -> Result:
    """Run one section in its processes; return status, rows and, unless it passed, the reason.

    ``seconds_left``: of the whole run. ``room``: how many processes fit at once.
    """
    section = SECTIONS[name]
    shares = room.processes(section, section.shares)
    if not torch.cuda.is_available():
        return {"status": "not measured", "reason": "no CUDA device", "rows": []}
    if not shares:
        reason = (
            f"{name} needs {section.gib:g} GiB of GPU memory, and {room.gib:.1f} GiB are free: "
            "run it on a larger GPU, or end what else uses this one"
        )
        return {"status": "not measured", "reason": reason, "rows": []}
    if seconds_left < _LEAST_SECONDS:
        reason = f"the {_whole(args)} s of the whole run were used up"
        return {"status": "not measured", "reason": reason, "rows": []}
    limit = min(section.seconds, seconds_left)
    end = time.perf_counter() + limit
    if section.ahead:
        _run_shares(name, args, room.processes(section, section.ahead), end, "--ahead")
    parts = _run_shares(name, args, shares, end)
    for part in parts:
        if part.get("reason") == _LATE:
            part["reason"] = f"not done after {limit:.0f} s"
    return together(parts)


def together(parts: Sequence[Result]) -> Result:
    """Combine the results of a section's shares."""
    if len(parts) == 1:
        return parts[0]
    statuses = [part["status"] for part in parts]
    worst = next(one for one in ("failed", "passed", "not measured") if one in statuses)
    rows = sorted((row for part in parts for row in part["rows"]), key=lambda row: row["kernel"])
    reasons = dict.fromkeys(part["reason"] for part in parts if "reason" in part)
    peaks = [part["peak_gib"] for part in parts if "peak_gib" in part]
    return (
        {"status": worst, "rows": rows}
        | ({"peak_gib": max(peaks)} if peaks else {})
        | ({"reason": "\n".join(reasons)} if reasons else {})
    )


def _run_shares(
    name: str, args: argparse.Namespace, shares: int, end: float, *more: str
) -> list[Result]:
    command = [sys.executable, str(_SCRIPT), "--section", name, *more]
    command += ["--quick"] * args.quick
    command += ["--gpus", str(args.gpus)] if getattr(args, "gpus", 1) > 1 else []
    command += ["--bundle", str(args.bundle)] if args.bundle else []
    command += ["--kernels", *args.kernels] if args.kernels else []
    section = SECTIONS[name]
    threads = max(1, section.cores // shares)
    # Beside others, torch may use no more threads than the section's cores.
    own_threads = {"OMP_NUM_THREADS": str(threads)} if section.beside_others else {}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{share}.json" for share in range(shares)]
        running = []
        try:
            for share, file in enumerate(files):
                own = ["--share", f"{share}/{shares}", "--result", str(file)]
                child = subprocess.Popen(
                    [*command, *own], env=own_threads | os.environ, start_new_session=True
                )
                running.append(child)
            return [_result(child, file, end) for child, file in zip(running, files, strict=True)]
        finally:
            for child in running:
                # With all that it has started, which would disturb the sections after it.
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def _result(child: subprocess.Popen[bytes], written: Path, end: float) -> Result:
    """Wait for a process until ``end``; return the result that it wrote, or how it exited."""
    try:
        code = child.wait(timeout=max(end - time.perf_counter(), 0))
        ended = f"its process ended with {code}"
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        ended = _LATE
    if not written.exists():
        return {"status": "failed", "reason": ended, "rows": []}
    result: Result = json.loads(written.read_text())
    if result.get("reason") == "ended before it was done":
        result["reason"] = ended
    return result
