"""What ranks in processes of their own do with shared memory in tests."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from rank_processes import Exchange

from kiln.engine.distributed.shared_memory import SharedMemory
from kiln.engine.errors import ConfigError


def write_to_all(rank: int, world: int, exchange: Exchange, num_bytes: int) -> dict[str, object]:
    """Write this rank's number to byte ``rank`` of all buffers, and to the last byte of the next.

    Return what a test wants to know of the own buffer.
    """
    memory = SharedMemory(num_bytes, rank, exchange)
    begin = memory.own.data_ptr()
    told: dict[str, object] = {
        "zeros": not memory.own.any(),
        "alignment": begin % 128,
        "peers": tuple(memory.peers.shape),
        "own_distance": int(memory.peers[rank]),
    }
    exchange(b"")  # all have seen the zeros
    for peer in memory.peers.tolist():
        ctypes.memset(begin + peer + rank, rank + 1, 1)
    after = int(memory.peers[(rank + 1) % world])
    ctypes.memset(begin + after + num_bytes - 1, rank + 101, 1)
    exchange(b"")  # all have written
    told["first"], told["last"] = memory.own[:world].tolist(), int(memory.own[-1])
    exchange(b"")  # all have read
    memory.close()
    memory.close()
    told["afterwards"] = memory.own[:world].tolist()
    return told


def open_files(rank: int, world: int, exchange: Exchange) -> tuple[int, int, int]:
    """Return the number of open files and mappings: before, with, and after a shared memory."""
    counts = [_held()]
    memory = SharedMemory(10_000, rank, exchange)
    counts.append(_held())
    memory.close()
    del memory
    counts.append(_held())
    return counts[0], counts[1], counts[2]


def _held() -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")) + sum("/dev/shm" in line for line in lines)


def refused(
    rank: int, world: int, exchange: Exchange, folder: Path, num_bytes: int
) -> tuple[str, int]:
    """Return the message of the ConfigError, and the number of files that stay open."""
    before = len(os.listdir("/proc/self/fd"))
    try:
        SharedMemory(num_bytes, rank, exchange, folder=folder)
    except ConfigError as error:
        return str(error), len(os.listdir("/proc/self/fd")) - before
    return "", 0


def die_at(rank: int, world: int, exchange: Exchange, folder: Path, step: int) -> str:
    """Share memory, while rank 1 kills itself at a step: before its n-th exchange, or at the end.

    Return the error of a rank that lives, or "" if it could go on.
    """
    steps = 0

    def counted(data: bytes) -> list[bytes]:
        nonlocal steps
        if rank == 1 and steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1
        return exchange(data)

    try:
        memory = SharedMemory(4096, rank, counted, folder=folder)
        counted(b"")
    except ConnectionError as error:
        return str(error)
    memory.close()
    return ""
