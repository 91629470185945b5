"""Open the memory of all ranks, and prove that each rank can write and read each buffer."""

from __future__ import annotations

import ctypes
import hashlib

import torch

from kiln.engine.distributed import cuda_driver
from kiln.engine.distributed.cuda_driver import DriverError
from kiln.engine.distributed.peer_handshake import Exchange, problem_of_all
from kiln.engine.distributed.peer_memory import PeerMemory
from kiln.engine.distributed.shared_memory import SharedMemory

RankMemory = PeerMemory | SharedMemory
_PATTERN = 64  # bytes that each rank writes to both ends of each buffer


def open_memory(num_bytes: int, rank: int, exchange: Exchange, device: torch.device) -> RankMemory:
    """Return this rank's buffer and its peers'. Raises ConfigError on every rank."""
    if device.type == "cpu":
        return SharedMemory(num_bytes, rank, exchange)
    return PeerMemory(num_bytes, rank, exchange, device)


def prove_access(memory: RankMemory, rank: int, exchange: Exchange) -> str:
    """Return why some rank cannot use some buffer, the same text on all ranks; "" if all can.

    Every rank writes a pattern to both ends of every buffer. After all have written, it reads those
    of all writers in every buffer. It overwrites the buffers' ends.
    """
    peers = memory.peers.tolist()
    world, problem = len(peers), ""
    try:
        for to in range(world):
            for end in _ends(memory, rank):
                _write(memory, peers[to] + end, _pattern(rank, to))
    except DriverError as error:
        problem = f"writing to the peers: {error}"
    problem = problem_of_all(exchange, problem)
    if problem:
        return problem
    try:
        wrong = [
            f"what rank {writer} wrote to the buffer of rank {to} is not there"
            for to in range(world)
            for writer in range(world)
            for end in _ends(memory, writer)
            if _read(memory, peers[to] + end) != _pattern(writer, to)
        ]
        problem = "; ".join(dict.fromkeys(wrong))
    except DriverError as error:
        problem = f"reading from the peers: {error}"
    return problem_of_all(exchange, problem)


def _ends(memory: RankMemory, writer: int) -> tuple[int, int]:
    """Return where a writer's patterns are in a buffer."""
    return writer * _PATTERN, memory.own.numel() - (writer + 1) * _PATTERN


def _pattern(writer: int, to: int) -> bytes:
    return hashlib.sha512(f"{writer} to {to}".encode()).digest()


def _write(memory: RankMemory, offset: int, data: bytes) -> None:
    address = memory.own.data_ptr() + offset
    if memory.own.device.type == "cuda":
        cuda_driver.write(address, data)
    else:
        ctypes.memmove(address, data, len(data))


def _read(memory: RankMemory, offset: int) -> bytes:
    address = memory.own.data_ptr() + offset
    if memory.own.device.type == "cuda":
        return cuda_driver.read(address, _PATTERN)
    return ctypes.string_at(address, _PATTERN)
