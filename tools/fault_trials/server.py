"""A server of loopback whose engine the trials kill, and what its processes hold."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from kiln.engine.bench.shapes import SHAPES, write_shape
from kiln.engine.cli.local_server import local_server

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "engine" / "demo"
_BOOT = (
    f"import sys; sys.path[:0] = [{str(ROOT / 'tools' / 'import_root')!r}, {str(ROOT / 'tools')!r}]"
)
_FOLLOWER = "kiln.engine.runner.follow"  # the module of a rank above 0
_START_SECONDS = 300.0
_MAX_RESTARTS = "100000"


@dataclass(frozen=True, slots=True)
class Held:
    """What a process holds: private memory in bytes, swapped or not; descriptors; threads."""

    num_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: its address, and the process id of its API process."""

    url: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        place = urlsplit(self.url)
        return str(place.hostname), int(place.port or 0)

    def engine(self) -> tuple[int, Path]:
        """Return the process id of the engine, and the folder of its sockets."""
        for pid in children(self.pid):
            for word in _command(pid):
                if word.startswith("/") and Path(word, "requests").exists():
                    return pid, Path(word)
        raise RuntimeError("the server has no engine process")

    def ranks(self) -> list[int]:
        """Return the process ids of the engine's ranks; the first one has started the others."""
        first, _ = self.engine()
        others = [
            pid for pid in children(first) if any(_FOLLOWER in word for word in _command(pid))
        ]
        return [first, *others]

    def is_ready(self) -> bool:
        """Whether requests are accepted."""
        try:
            return httpx.get(f"{self.url}/health/ready", timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def metric(self, name: str) -> float:
        """Return a metric without a label."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        line = next(one for one in text.splitlines() if one.startswith(f"kiln:{name}{{"))
        return float(line.rpartition(" ")[2])


@contextmanager
def server(engine: str, *flags: str) -> Iterator[Server]:
    """Serve the demo model on a CPU; ``engine`` "stub" computes nothing and takes 2 ms a step.

    The name of a shape, such as "llama3-8b", is that model with random weights, without a
    tokenizer, on a GPU if there is one.

    The engine is restarted as often as it is killed, after 1 s each time: it counts as healthy at
    once, so that no restart is the second one in a row.
    """
    seconds = 0.002 if engine == "stub" else None
    run = f"from fault_trials import server; sys.exit(server.serve({seconds}))"
    program = [sys.executable, "-P", "-c", f"{_BOOT}; {run}"]
    with tempfile.TemporaryDirectory() as parent:
        model = [str(DEMO), "--device", "cpu"]
        if engine in SHAPES:
            model = [str(write_shape(engine, Path(parent))), "--load-format", "dummy"]
        arguments = [*model, "--max-restarts", _MAX_RESTARTS, *flags]
        with local_server(arguments, _START_SECONDS, program) as (url, process):
            yield Server(url, process.pid)


def serve(seconds: float | None) -> int:
    """Run the ``kiln`` command, with an engine that computes nothing if ``seconds`` are given."""
    from api_process import engine

    import kiln.engine.cli.serving as serving
    from kiln.engine.cli.main import main

    policy = serving.RestartPolicy
    serving.RestartPolicy = partial(policy, healthy=0.0)  # type: ignore[misc, assignment]
    return main() if seconds is None else engine.serve(seconds)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += map(int, task.read_text().split())
    return found


def family(pid: int) -> list[int]:
    """Return a process, and all that it and those have started."""
    return [pid, *(own for child in children(pid) for own in family(child))]


def is_running(pid: int) -> bool:
    """Whether a process runs: it is not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def held(pid: int) -> Held:
    """Return what a process holds."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return Held(kib * 1024, len(os.listdir(f"/proc/{pid}/fd")), int(status["Threads"]))


def _command(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []
