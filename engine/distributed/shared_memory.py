"""Memory of one machine's CPU that all ranks of a group can access."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from kiln.engine.distributed.peer_handshake import (
    PROBLEM,
    Exchange,
    problem_of_all,
    problems_of,
    tell_all,
)
from kiln.engine.errors import ConfigError

_FOLDER = Path("/dev/shm")
_PROOF = 16  # random bytes behind a buffer, by which a peer knows that it has found the right one


class SharedMemory:
    """A buffer for each rank of a group, which all of them can access.

    ``own``: this rank's, [num_bytes] uint8, zeros at first, at a multiple of 128 bytes. ``peers``:
    [world] int64, the distance in bytes from ``own`` to each rank's buffer; it differs between
    ranks, as each has addresses of its own. Only kernels access the peers' buffers.

    ``exchange``: sends some bytes to all ranks, as many on each, and returns those of all ranks in
    their order. It is called twice, and every rank must construct its SharedMemory at the same
    time. ``folder``: a folder in memory. The files in it have no names, so that nothing is left
    behind, however a rank ends.

    Raises ConfigError on every rank if any of them cannot create, open or reserve the memory; so
    all can go on without it. What ``exchange`` raises is passed on.
    """

    def __init__(
        self, num_bytes: int, rank: int, exchange: Exchange, *, folder: Path = _FOLDER
    ) -> None:
        if num_bytes < 1:
            raise ValueError(f"SharedMemory: num_bytes is {num_bytes}, want at least 1")
        with ExitStack() as files:  # mapped memory outlives them
            told: dict[str, Any] = {"num_bytes": num_bytes, "pid": os.getpid()}
            try:
                descriptor = _create(folder, num_bytes + _PROOF)
                files.callback(os.close, descriptor)
                proof = secrets.token_bytes(_PROOF)
                os.pwrite(descriptor, proof, num_bytes)
                told |= {"descriptor": descriptor, "proof": proof.hex()}
            except OSError as error:
                told[PROBLEM] = _no_memory(error, folder, num_bytes + _PROOF)
            all_told = tell_all(exchange, told)
            _check(problems_of(all_told))
            if all_told[rank] != told:
                raise ValueError(
                    f"SharedMemory: the exchange did not return rank {rank}'s own bytes"
                )
            buffers, problem = [], ""
            try:
                buffers = [_open(one, num_bytes) for one in all_told]
            except (OSError, ValueError) as error:
                problem = str(error)
            _check(problem_of_all(exchange, problem))
        begin = buffers[rank].data_ptr()
        self.own = buffers[rank][:num_bytes]
        self.peers = torch.tensor([buffer.data_ptr() - begin for buffer in buffers])
        self._buffers = buffers

    def close_peers(self) -> None:
        """Do nothing: a file that a peer has mapped lives as long as its mapping."""

    def close(self) -> None:
        """Give the memory back, as soon as no tensor refers to it.

        Afterwards no kernel may access the peers' buffers, which may be gone at once.
        """
        self._buffers.clear()


def _create(folder: Path, num_bytes: int) -> int:
    """Return the descriptor of a file without a name, all of whose memory is reserved.

    Without the reservation, a write to it would end the process when the memory is used up.
    """
    descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _no_memory(error: OSError, folder: Path, num_bytes: int) -> str:
    text = f"{num_bytes} bytes of shared memory in {folder}: {error.strerror}"
    if error.errno not in (errno.ENOSPC, errno.ENOMEM):
        return text
    status = os.statvfs(folder)
    return (
        f"{text}; {status.f_bavail * status.f_frsize} bytes are free, and every rank needs as "
        "many: enlarge it (docker run --shm-size=…, or mount -o remount,size=…)"
    )


def _check(problem: str) -> None:
    if problem:
        raise ConfigError(f"the ranks cannot share memory: {problem}")


def _open(told: dict[str, Any], num_bytes: int) -> torch.Tensor:
    """Map a rank's buffer, its proof included. Raises OSError and ValueError."""
    if told["num_bytes"] != num_bytes:
        raise ValueError(f"a peer's buffer has {told['num_bytes']} bytes, its own has {num_bytes}")
    path = f"/proc/{told['pid']}/fd/{told['descriptor']}"
    advice = "all ranks must run on one machine, as one user, and see each other's processes"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{path} cannot be opened ({error.strerror}): {advice}") from None
    try:
        if os.pread(descriptor, _PROOF, num_bytes).hex() != told["proof"]:
            raise ValueError(f"{path} is not the peer's buffer: {advice}")
        mapped = mmap.mmap(descriptor, num_bytes + _PROOF, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)  # keeps `mapped` alive
