"""Notice that a follower has exited, failed, or is silent, within seconds."""

from __future__ import annotations

import json
import selectors
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

from kiln.engine.distributed.channel import Closed, Kind
from kiln.engine.distributed.held_for import HeldFor
from kiln.engine.distributed.joining import Member
from kiln.engine.distributed.process_state import STOPPED_LIMIT, is_stopped
from kiln.engine.errors import DeviceError, KilnError, loading_error

SILENT_SECONDS = 8.0  # a follower says every second that it lives
_SILENT_LOADING = 120.0  # the same while it loads, when a library may hold Python's lock for long
_CHECK_SECONDS = 0.5
_EXIT_SECONDS = 1.0  # for the exit code of a process whose connection has closed
_AGAIN = "an engine needs all its ranks: all must be started again"


class Watch:
    """A thread that reads what followers say. ``error`` is set when a rank is gone.

    ``replied`` gets the rank and the error of each reply; ``lost`` is called once, with the error.
    """

    def __init__(
        self,
        members: Sequence[Member],
        replied: Callable[[tuple[int, str | None]], None],
        lost: Callable[[KilnError], None],
    ) -> None:
        self.error: KilnError | None = None
        self.serving = False
        self.closing = False
        self._members = {member.life.fileno(): member for member in members}
        self._held = {number: HeldFor() for number in self._members}  # by SIGSTOP
        self._selector = selectors.DefaultSelector()
        for number in self._members:
            self._selector.register(number, selectors.EVENT_READ)
        self._size = len(members) + 1
        self._replied, self._lost = replied, lost
        threading.Thread(target=self._run, name="kiln-ranks", daemon=True).start()

    def _run(self) -> None:
        heard = dict.fromkeys(self._members, time.monotonic())
        looked = time.monotonic()
        while not self.closing:
            error = self._look(heard)
            now = time.monotonic()
            if now - looked > 4 * _CHECK_SECONDS:  # this process itself was stopped
                heard = dict.fromkeys(heard, now)
            looked = now
            error = error or self._stopped() or self._silent(heard, now)
            if self.closing:
                return
            if error is not None:
                self.error = error
                self._lost(error)
                return

    def _look(self, heard: dict[int, float]) -> KilnError | None:
        """Read what has come; return why a rank is gone."""
        for ready, _ in self._selector.select(_CHECK_SECONDS):
            number = ready.fd
            member = self._members[number]
            try:
                kind, content = member.life.receive()
            except Closed:
                return self._gone(member)
            heard[number] = time.monotonic()
            if kind is Kind.REPLY:
                self._replied((member.rank, json.loads(content)["error"]))
            elif kind is Kind.FAILED:
                return self._failure(member, json.loads(content))
        return None

    def _stopped(self) -> KilnError | None:
        """Return why a rank on this machine is lost if it is stopped, long before its silence."""
        for number, member in self._members.items():
            stops = member.child is not None and is_stopped(member.pid)
            if self._held[number].look(stops) > STOPPED_LIMIT:
                return DeviceError(
                    f"{self._name(member)} was stopped (SIGSTOP) for {STOPPED_LIMIT:g} s; {_AGAIN}"
                )
        return None

    def _silent(self, heard: dict[int, float], now: float) -> KilnError | None:
        limit = SILENT_SECONDS if self.serving else _SILENT_LOADING
        for number, last in heard.items():
            if now - last > limit:
                return DeviceError(
                    f"{self._name(self._members[number])} has said nothing for {limit:g} s: it is "
                    f"stopped or frozen, or its machine is; {_AGAIN}"
                )
        return None

    def _gone(self, member: Member) -> KilnError:
        how = "closed its connection"
        if member.child is not None:
            try:
                code = member.child.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                how = "closed its connection, and still runs"
            else:
                how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        return DeviceError(f"{self._name(member)} {how}; {_AGAIN}")

    def _failure(self, member: Member, told: dict[str, str]) -> KilnError:
        """Return the error of a rank that says why it exits: one of a load, or DeviceError."""
        kind, what = told["kind"], told["message"]
        if self.serving or not told["expected"]:
            return DeviceError(f"{self._name(member)} stopped on {kind}: {what}; {_AGAIN}")
        return loading_error(kind, f"{self._name(member)}: {what}")

    def _name(self, member: Member) -> str:
        return f"rank {member.rank} of {self._size} (process {member.pid})"
