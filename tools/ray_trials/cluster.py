"""Run examples/ray_serve/serve.py on this machine, and find every process that it starts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "engine" / "demo"
FLAGS = ("--replicas", "2", "--device", "cpu", "--kv-memory-gib", "0.25")
_MARK = "RAY_SERVE_TRIAL_MARK"  # in the environment of every process that descends from the command
_START_SECONDS = 180.0
_STOP_SECONDS = 60.0


@dataclass
class Cluster:
    """A running command. ``log`` is what it and the replicas print."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    mark: str

    def replicas(self) -> dict[str, int]:
        """Return the port of each replica's server, by the replica's id, also of those replaced."""
        found = re.findall(
            r"replica (\w+) serves on http://127\.0\.0\.1:(\d+)", self.log.read_text()
        )
        return {name: int(port) for name, port in found}

    def metrics(self) -> str:
        """Return the front's /metrics."""
        return httpx.get(f"{self.url}/metrics", timeout=120).text

    def alive(self) -> set[str]:
        """Return the ids of the replicas that answer."""
        return set(re.findall(r'kiln:engine_ready\{replica="(\w+)",[^}]*\} 1\.0', self.metrics()))

    def restarts(self) -> float:
        """Return how many engines the servers have started again."""
        lines = [line for line in self.metrics().splitlines() if "engine_restarts_total{" in line]
        return sum(float(line.split()[-1]) for line in lines)

    def processes(self, text: str = "") -> dict[int, str]:
        """Return the command lines, by process id, of the command's processes that have a text."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue  # it has ended, or is not ours
            if f"{_MARK}={self.mark}".encode() in environment and text in command:
                found[int(folder.name)] = command
        return found

    def server_of(self, replica: str) -> int:
        """Return the process id of a replica's ``kiln serve``."""
        inode = _listening_inode(self.replicas()[replica])
        for pid in self.processes("kiln.engine.cli.main"):
            links = (Path(f"/proc/{pid}/fd") / name for name in os.listdir(f"/proc/{pid}/fd"))
            if any(os.readlink(link) == f"socket:[{inode}]" for link in links if link.is_symlink()):
                return pid
        raise AssertionError(f"replica {replica} has no server")

    def engine_of(self, replica: str) -> int:
        """Return the process id of the engine of a replica's ``kiln serve``."""
        server = self.server_of(replica)
        engines = self.processes("kiln.engine.process.worker")
        return next(pid for pid in engines if parent_of(pid) == server)

    def fronts(self) -> list[int]:
        """Return the process ids of the fronts."""
        return list(self.processes("ServeReplica:kiln:front"))

    @staticmethod
    def wait_until(holds: Callable[[], object], seconds: float = 60.0) -> None:
        """Return as soon as a condition holds; fail after some seconds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, f"not so after {seconds:g} s"
            time.sleep(0.1)


@contextmanager
def running(log: Path, flags: Sequence[str] = FLAGS, port: int | None = None) -> Iterator[Cluster]:
    """Run the command, which stops at the end; what it leaves is killed.

    ``port``: of the front; None: one that is free.
    """
    port = port or free_port()
    mark = uuid.uuid4().hex
    command = [sys.executable, "examples/ray_serve/serve.py", str(DEMO), *flags]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, _MARK: mark},
            start_new_session=True,
        )
    cluster = Cluster(process, log, f"http://127.0.0.1:{port}", mark)
    try:
        cluster.wait_until(
            lambda: b"replicas serve on" in log.read_bytes() or process.poll() is not None,
            _START_SECONDS,
        )
        assert process.poll() is None, log.read_text()[-2000:]
        yield cluster
    finally:
        process.send_signal(signal.SIGINT)  # no effect if it has ended
        try:
            process.wait(_STOP_SECONDS)
        finally:
            for pid in cluster.processes():
                os.kill(pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        found: int = free.getsockname()[1]
    return found


def parent_of(pid: int) -> int:
    """Return the id of a process's parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _listening_inode(port: int) -> str:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":  # LISTEN
            return fields[9]
    raise AssertionError(f"nobody listens on port {port}")
