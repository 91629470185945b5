"""Bind the port first, so that a port in use is reported before the model is loaded."""

from __future__ import annotations

import ipaddress
import socket

from kiln.engine.errors import ConfigError

_BACKLOG = 2048


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on host and port (0: any free port). Raises ConfigError.

    Connections wait in the socket's queue until the server accepts them.
    """
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port}: must be 0 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        hint = "choose another with --port" if error.errno == 98 else "check --host and --port"
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; {hint}"
        ) from error
    # Accepted connections inherit TCP_NODELAY. Without it each event waits 40 ms for the client's
    # delayed ACK. asyncio sets it only on sockets created with proto=IPPROTO_TCP.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL to open in a browser on this machine."""
    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
