"""Messages between the ranks' processes, over a socket: a kind, a length, bytes. No pickle."""

from __future__ import annotations

import json
import socket
import struct
import threading
from enum import IntEnum
from typing import Any

_HEADER = struct.Struct("<BI")
# A machine that is gone is noticed after 20 s. A process that is stopped still answers.
_KEEPALIVE = (
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
)

Address = str | tuple[str, int]  # the path of a Unix socket, or host and port


class Kind(IntEnum):
    """What a message says."""

    HELLO = 0  # to rank 0, first: who I am
    START = 1  # to a follower, first: what to run
    STEP = 2  # to followers: run this step
    CALL = 3  # to followers: a call of kiln.engine.distributed.calls
    STOP = 4  # to followers: exit
    ALIVE = 5  # to rank 0, every second
    REPLY = 6  # to rank 0: an adapter was read, or could not be
    FAILED = 7  # to rank 0: this rank is about to exit


_KINDS = frozenset(Kind)


class Closed(Exception):
    """The other end of a channel is gone."""


class Channel:
    """One end of a connection. Several threads may send, and one may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a message. Raises Closed."""
        try:
            with self._lock:
                self._socket.sendall(_HEADER.pack(kind, len(content)) + content)
        except OSError as error:
            raise Closed(str(error)) from error
        except BaseException:  # Ctrl-C: a part may have been sent, and nobody could read the rest
            self._socket.close()
            raise

    def tell(self, kind: Kind, content: Any) -> None:
        """Send a message whose content is JSON. Raises Closed."""
        self.send(kind, json.dumps(content).encode())

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for a message. Raises Closed."""
        kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
        if kind not in _KINDS:
            raise Closed(f"a message of kind {kind}, which no rank sends")
        return Kind(kind), self._exactly(length)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time of each wait; None: no limit. A late message raises Closed."""
        self._socket.settimeout(seconds)

    def fileno(self) -> int:
        """Return the descriptor, for selectors."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(count - len(parts))
            except OSError as error:
                raise Closed(str(error)) from error
            if not part:
                raise Closed("the other end closed it")
            parts += part
        return bytes(parts)


def listen(address: Address) -> socket.socket:
    """Return a socket that accepts channels; port 0 is any free one."""
    listener = _socket_for(address)
    listener.bind(address)
    listener.listen()
    return listener


def accept(listener: socket.socket) -> Channel:
    """Accept one connection. Raises TimeoutError after the listener's timeout."""
    connection, _ = listener.accept()
    return Channel(_tuned(connection))


def dial(address: Address) -> Channel:
    """Connect to a listener. Raises OSError."""
    connection = _socket_for(address)
    connection.connect(address)
    return Channel(_tuned(connection))


def _socket_for(address: Address) -> socket.socket:
    return socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET)


def _tuned(connection: socket.socket) -> socket.socket:
    connection.settimeout(None)
    if connection.family == socket.AF_INET:
        for option in _KEEPALIVE:
            connection.setsockopt(*option)
    return connection
