"""Ranks as forked processes: a program for tests, because threads of one process cannot wait for
each other inside a kernel of the host toolchain. A fork needs no time to import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kiln.engine.distributed.connect import LOOPBACK, connect, file_store
from kiln.engine.distributed.group import Group
from kiln.jit_kernels.declare.settings import settings

CPU = torch.device("cpu")
Case = Callable[[Group], Any]


def set_environment(**variables: str) -> None:
    """Set Kiln's variables for this process and those that it forks from now on."""
    for name in [name for name in os.environ if name.startswith("KILN_ALL_REDUCE")]:
        del os.environ[name]
    os.environ.update(variables)
    settings.cache_clear()


def run_ranks(world: int, cases: dict[str, Case]) -> list[dict[str, Any]]:
    """Run cases on some ranks, one after another; return what each returned, or its error."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                _leave_with(lambda rank=rank: _rank(rank, world, folder, cases))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
        assert not any(codes), (codes, found)
        return found


def _rank(rank: int, world: int, folder: Path, cases: dict[str, Case]) -> int:
    results: dict[str, Any] = {}
    for number, (name, case) in enumerate(cases.items()):
        place = folder / str(number)
        place.mkdir(exist_ok=True)
        group = connect(file_store(place, world), rank, world, CPU, LOOPBACK)
        try:
            results[name] = case(group)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": type(error).__name__, "message": str(error)}
        group.close()
    (folder / f"{rank}.json").write_text(json.dumps(results))
    return 0


def _leave_with(function: Callable[[], int]) -> None:
    code = 1
    try:
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class ForkedChild:
    """What followers.py uses of subprocess.Popen, for the module of a follower."""

    def __init__(self, command: list[str], **_: Any) -> None:
        from kiln.engine.runner import follow

        self._code: int | None = None
        self._lock = threading.Lock()  # the watch and the main thread may ask at the same time
        self.pid = os.fork()
        if self.pid == 0:
            _leave_with(lambda: follow.main(command[-2:]))

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._code = os.waitstatus_to_exitcode(status) if pid else None
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        until = time.monotonic() + (1e9 if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("fork", timeout or 0)
            time.sleep(0.01)
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, 9)
