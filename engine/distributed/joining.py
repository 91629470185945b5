"""Wait until every follower has connected to rank 0."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kiln.engine.distributed.channel import Channel, Closed, Kind, accept
from kiln.engine.errors import ConfigError

_CHECK_SECONDS = 0.05
_ROLES = ("messages", "life")


@dataclass(slots=True)
class Member:
    """A follower. ``child`` is None if another program started it."""

    rank: int
    pid: int
    messages: Channel
    life: Channel
    child: subprocess.Popen[bytes] | None

    def kill(self) -> None:
        """Kill the process, or let it end itself because its connections close."""
        if self.child is not None:
            self.child.kill()
        else:
            self.close()

    def close(self) -> None:
        """Close the connections, at which the follower exits."""
        self.messages.close()
        self.life.close()


def join(
    listener: socket.socket,
    size: int,
    children: Mapping[int, subprocess.Popen[bytes]],
    seconds: float,
) -> list[Member]:
    """Return the ranks 1 to ``size - 1``, connected. ``children``: processes of this machine.

    Raises ConfigError if one exits, or does not come within ``seconds``.
    """
    listener.settimeout(_CHECK_SECONDS)
    until = time.monotonic() + seconds
    found: dict[tuple[int, str], tuple[Channel, int]] = {}
    while len(found) < len(_ROLES) * (size - 1):
        try:
            channel = accept(listener)
        except TimeoutError:
            _check(children, until, seconds, missing(found, size))
            continue
        hello = _hello(channel, size)
        if hello is None or hello[:2] in found:
            channel.close()  # not one of ours
            continue
        rank, role, pid = hello
        found[rank, role] = (channel, pid)
    members = []
    for rank in range(1, size):
        (messages, pid), (life, _) = (found[rank, role] for role in _ROLES)
        members.append(Member(rank, pid, messages, life, children.get(rank)))
    return members


def missing(found: Mapping[tuple[int, str], object], size: int) -> list[int]:
    """Return the ranks that have not connected yet."""
    return [rank for rank in range(1, size) if any((rank, role) not in found for role in _ROLES)]


def _check(
    children: Mapping[int, subprocess.Popen[bytes]], until: float, seconds: float, late: list[int]
) -> None:
    for rank, child in children.items():
        code = child.poll()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
            raise ConfigError(
                f"rank {rank} (process {child.pid}) {how} before it had connected: its own output "
                "says why; start Kiln again"
            )
    if time.monotonic() > until:
        ranks = ", ".join(map(str, late))
        raise ConfigError(
            f"rank {ranks} has not connected to rank 0 within {seconds:g} s: is it started, with "
            "the same command, and does a firewall let it through?"
        )


def _hello(channel: Channel, size: int) -> tuple[int, str, int] | None:
    """Return rank, role and process id; None from a stranger."""
    try:
        channel.set_timeout(1.0)
        kind, content = channel.receive()
        channel.set_timeout(None)
        told = json.loads(content)
        rank, role, pid = int(told["rank"]), str(told["role"]), int(told["pid"])
    except (Closed, ValueError, KeyError, TypeError):
        return None
    known = kind is Kind.HELLO and 1 <= rank < size and role in _ROLES
    return (rank, role, pid) if known else None
