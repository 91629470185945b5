"""Connect the ranks of an engine to a group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from kiln.cache.env import prepare_nccl
from kiln.engine.distributed.group import Group

_dist: Any = torch.distributed  # torch types only part of it
LOOPBACK = "127.0.0.1"
_MEET_SECONDS = 60.0  # from the first rank that connects to the last
_NEVER = timedelta(days=365)  # a rank may load for long; whether it lives is watched elsewhere
_CHECK_SECONDS = 0.05


def file_store(folder: Path, size: int) -> Any:
    """Return the meeting place of ranks on this machine: a file in a private folder."""
    store = _dist.FileStore(str(folder / "rendezvous"), size)
    store.set_timeout(timedelta(seconds=_MEET_SECONDS))
    return store


def connect(store: Any, rank: int, size: int, device: torch.device, host: str) -> Group:
    """Connect to the other ranks through the store. ``host``: this machine's address for them.

    Raises RuntimeError if they do not come.
    """
    backend = _nccl if device.type == "cuda" else _gloo
    return Group(rank, size, device, backend(store, rank, size, device, host))


def connect_while(check: Callable[[], None], make: Callable[[], Group]) -> Group:
    """Return ``make()``, and call ``check`` meanwhile, whose error ends the wait at once.

    Connecting cannot be interrupted: it waits for a rank that has died as for one that is late.
    """
    made: Future[Group] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=run, name="kiln-connect", daemon=True).start()
    while True:
        try:
            return made.result(_CHECK_SECONDS)
        except TimeoutError:
            check()


def _gloo(store: Any, rank: int, size: int, device: torch.device, host: str) -> Any:
    options = _dist.ProcessGroupGloo._Options()
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = _NEVER
    return _dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, device: torch.device, host: str) -> Any:
    prepare_nccl(one_machine=host == LOOPBACK)
    torch.cuda.set_device(device)
    options = _dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    backend = _dist.ProcessGroupNCCL(store, rank, size, options)
    backend.eager_connect_single_device(device)
    return backend
