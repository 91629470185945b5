"""Rank 0's hold on the other ranks: it starts them, talks to them, and notices when one is gone.

All ranks live or die together. A follower ends itself when rank 0 is gone. When a follower ends,
fails, or is silent, rank 0 kills the others, so that its own call that waits for one of them
raises.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVarTuple

from kiln.engine.distributed.calls import encode_call
from kiln.engine.distributed.channel import Channel, Closed, Kind, listen
from kiln.engine.distributed.command import end_process, module_command, private_folder
from kiln.engine.distributed.joining import Member, join
from kiln.engine.distributed.launched import Launched
from kiln.engine.distributed.watch import Watch
from kiln.engine.errors import ConfigError, DeviceError, KilnError

ADDRESS_KEY = "address"  # in the store: where rank 0 listens
_START_SECONDS = 60.0  # for a process of this machine to connect
_STOP_SECONDS = 5.0  # for a follower to exit when it is told to
_VERDICT_SECONDS = 1.5  # for the watch to find out why a call of rank 0 failed

OnLost = Callable[[KilnError], None]
Given = TypeVarTuple("Given")


class Followers:
    """The ranks 1 to ``size - 1`` of an engine. Make it with ``spawn`` or ``await_launched``."""

    def __init__(
        self, members: list[Member], folder: Path | None, on_lost: OnLost | None = None
    ) -> None:
        self.size = len(members) + 1
        self.folder = folder
        self._members = members
        self._replies: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._abort: Callable[[], None] | None = None
        self._on_lost = on_lost
        self._closed = False
        self._watch = Watch(members, self._replies.put, self._end)

    @classmethod
    def spawn(cls, size: int, module: str, on_lost: OnLost | None = None) -> Followers:
        """Start followers on this machine, which run ``main`` of a module.

        Raises ConfigError if one cannot be started.
        """
        folder = private_folder()
        children: dict[int, subprocess.Popen[bytes]] = {}
        # Ctrl-C reaches rank 0 only. An engine process has a session of its own already: its ranks
        # stay in it, so that whoever kills the session's processes kills all of them.
        reached = os.getsid(0) != os.getpid()
        try:
            address = str(folder / "ranks")
            with listen(address) as listener:
                for rank in range(1, size):
                    children[rank] = subprocess.Popen(
                        [*module_command(module), str(rank), address],
                        stdin=subprocess.DEVNULL,
                        start_new_session=reached,
                    )
                members = join(listener, size, children, _START_SECONDS)
            return cls(members, folder, on_lost)
        except BaseException as error:
            for child in children.values():
                child.kill()
                child.wait()
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise ConfigError(f"cannot start the processes of other ranks: {error}") from error
            raise

    @classmethod
    def await_launched(
        cls, place: Launched, store: Any, on_lost: OnLost | None = None
    ) -> Followers:
        """Wait for the followers that torchrun started, on this machine and on others.

        Raises ConfigError if one does not come.
        """
        with listen((place.own_address(), 0)) as listener:
            host, port = listener.getsockname()[:2]
            store.set(ADDRESS_KEY, f"{host}:{port}")
            return cls(join(listener, place.world, {}, 10 * _START_SECONDS), None, on_lost)

    def start(self, content: Any) -> None:
        """Tell all what to run, JSON."""
        self.send(Kind.START, json.dumps(content).encode())

    def use_abort(self, abort: Callable[[], None]) -> None:
        """Call ``abort`` when a rank is gone, so that rank 0's own calls end."""
        self._abort = abort

    def declare_ready(self) -> None:
        """Notice silence earlier from now on: while they load, ranks may be busy for long.

        All have connected, so that nothing is left where they met if this process is killed.
        """
        self._watch.serving = True
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a message to all. Raises DeviceError if a rank is gone."""
        for member in self._members:
            try:
                member.messages.send(kind, content)
            except Closed as error:
                lost = DeviceError(f"rank {member.rank} of {self.size} is gone: {error}")
                raise self.blame(lost) from error

    def call(self, method: Callable[[Any, *Given], object], *arguments: *Given) -> None:
        """Call a method of a follower's class on all. Raises DeviceError if a rank is gone."""
        self.send(Kind.CALL, encode_call(method, *arguments))

    def replies(self) -> list[tuple[int, str]]:
        """Wait for a reply of each follower; return rank and error of those that failed.

        Raises DeviceError if a rank is gone.
        """
        failed = []
        for _ in self._members:
            while True:
                try:
                    rank, error = self._replies.get(timeout=0.2)
                    break
                except queue.Empty:
                    self.check()
            if error is not None:
                failed.append((rank, error))
        return failed

    def check(self) -> None:
        """Raise the error, DeviceError or that of a failed load, if a rank is gone."""
        if self._watch.error is not None:
            raise self._watch.error
        if self._closed:
            raise DeviceError("this engine was closed, and its other ranks with it: make a new one")

    def blame(self, error: Exception) -> Exception:
        """Return why a call of rank 0 failed: another rank's error if one is gone, else its own."""
        if isinstance(error, KilnError) and not isinstance(error, DeviceError):
            return error
        until = time.monotonic() + _VERDICT_SECONDS
        while self._watch.error is None and time.monotonic() < until:
            time.sleep(0.01)
        return self._watch.error or error

    def stop(self) -> None:
        """Tell all followers to exit, without waiting for it: they close their group first."""
        if self._closed:
            return
        self._closed = self._watch.closing = True
        for member in self._members:
            try:
                member.life.send(Kind.STOP)
                member.messages.send(Kind.STOP)
            except Closed:
                continue  # it has exited

    def close(self) -> None:
        """Stop all followers, and kill those that do not exit; safe to call more than once."""
        self.stop()
        until = time.monotonic() + _STOP_SECONDS
        for member in self._members:
            if member.child is not None:
                end_process(member.child, until - time.monotonic())
            else:
                _await_end(member.life, until)
        for member in self._members:
            member.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, error: KilnError) -> None:
        """Do what must follow when a rank is gone, in the thread of the watch."""
        for member in self._members:
            member.kill()
        if self._abort is not None:
            self._abort()
        if self._on_lost is not None:
            self._on_lost(error)


def _await_end(life: Channel, until: float) -> None:
    """Wait until a process that another program started has closed its connection."""
    try:
        while time.monotonic() < until:
            life.set_timeout(max(0.01, until - time.monotonic()))
            life.receive()  # a heartbeat
    except (Closed, OSError):
        return
