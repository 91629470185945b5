"""File descriptors of one process for others of the same user, over Unix sockets."""

from __future__ import annotations

import os
import shutil
import socket
import struct
from pathlib import Path

from kiln.engine.distributed.command import private_folder
from kiln.engine.distributed.peer_handshake import PROBLEM, Exchange, problems_of, tell_all
from kiln.engine.errors import ConfigError

_SECONDS = 20.0  # for a rank that is alive to send its descriptor
_RANK = struct.Struct("<I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def share_descriptor(own: int, rank: int, exchange: Exchange) -> dict[int, int]:
    """Send a descriptor to all other ranks; return theirs by rank, which the caller closes.

    Raises ConfigError on every rank if one cannot listen; ConfigError and OSError, on this rank
    alone, if it cannot reach the others.
    """
    folder = private_folder()
    found: dict[int, int] = {}
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            all_told = tell_all(exchange, _listen(listener, folder / "memory"))
            problem = problems_of(all_told)
            if problem:
                raise ConfigError(problem)
            for other, told in enumerate(all_told):
                if other != rank:
                    _send(own, rank, told["path"])
            while len(found) < len(all_told) - 1:
                connection, _ = listener.accept()
                with connection:
                    other, descriptor = _receive(connection)
                found[other] = descriptor
    except BaseException:
        for descriptor in found.values():
            os.close(descriptor)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def _listen(listener: socket.socket, path: Path) -> dict[str, str]:
    """Return the path, or the problem, for the other ranks."""
    listener.settimeout(_SECONDS)
    try:
        listener.bind(str(path))
        listener.listen(64)
    except OSError as error:
        return {PROBLEM: f"{path} cannot be a Unix socket: {error}"}
    return {"path": str(path)}


def _send(descriptor: int, rank: int, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_SECONDS)
        connection.connect(path)
        socket.send_fds(connection, [_RANK.pack(rank)], [descriptor])


def _receive(connection: socket.socket) -> tuple[int, int]:
    """Return rank and descriptor that one of this user's processes sends."""
    connection.settimeout(_SECONDS)
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(told)
    content, descriptors, _, _ = socket.recv_fds(connection, _RANK.size, 1)
    if uid != os.geteuid() or len(content) != _RANK.size or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConfigError(f"a process of user {uid} sent no rank's memory")
    return int(_RANK.unpack(content)[0]), descriptors[0]
