"""A follower's connections to rank 0. They are open before torch is imported.

On one come the messages, which the main thread reads. The other tells rank 0 every second that this
process lives, and ends the process when rank 0 is gone, whatever the main thread is waiting for.
Before rank 0 closes the engine, it sends a message on both, so that the main thread can close too.
Calls of the main thread that wait for rank 0 may fail then, which is no failure of this rank.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kiln.cache.env import EnvError
from kiln.engine.distributed.channel import Address, Closed, Kind, dial
from kiln.engine.errors import KilnError

if TYPE_CHECKING:
    from kiln.engine.distributed.group import Group

_ALIVE_SECONDS = 1.0
_HEAR_SECONDS = 1.0  # for the other thread to hear of rank 0's end, if that made a call fail

logger = logging.getLogger(__name__)


class Inbox:
    """The connections of one follower. Raises OSError if rank 0 does not listen."""

    def __init__(self, address: Address, rank: int) -> None:
        self._rank = rank
        self._messages, self._life = dial(address), dial(address)
        for role, channel in (("messages", self._messages), ("life", self._life)):
            channel.tell(Kind.HELLO, {"rank": rank, "pid": os.getpid(), "role": role})
        self._check: Callable[[], None] | None = None
        self._stopped = threading.Event()  # rank 0 has announced that it closes
        threading.Thread(target=self._live, name="kiln-life", daemon=True).start()

    def use_check(self, check: Callable[[], None]) -> None:
        """Call ``check`` every second; an error that it raises is told, and ends the process."""
        self._check = check

    def run(self, work: Callable[[dict[str, Any]], Group]) -> int:
        """Do ``work`` with what rank 0 wants to be run, and close the group that it returns.

        Returns the exit code. If ``work`` raises, the process exits at once: another rank may never
        send what this one waits for.
        """
        try:
            kind, content = self._messages.receive()
            assert kind is Kind.START, kind
            group = work(json.loads(content))
        except Exception as error:
            code = 1 if isinstance(error, Closed) else self._fail(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        else:
            group.close()
        return 0

    def next(self) -> tuple[Kind, bytes]:
        """Wait for a message. Raises Closed when rank 0 has gone."""
        return self._messages.receive()

    def reply(self, error: str | None) -> None:
        """Say why an adapter could not be read; None: it was read."""
        self._life.tell(Kind.REPLY, {"error": error})

    def _fail(self, error: Exception) -> int:
        """Say why this rank is about to exit, unless rank 0 has ended it; return the exit code."""
        from kiln.jit_kernels.declare.errors import KernelError

        if self._stopped.wait(_HEAR_SECONDS):  # if rank 0 is gone, the other thread exits
            return 0
        expected = isinstance(error, KilnError | KernelError | EnvError)
        if not expected:
            logger.error("rank %d stopped on an unexpected error", self._rank, exc_info=error)
        self._tell(error, expected)
        return 1

    def _tell(self, error: Exception, expected: bool) -> None:
        content = {
            "kind": type(error).__name__,
            "message": str(error) or repr(error),
            "expected": expected,
        }
        try:
            self._life.tell(Kind.FAILED, content)
        except Closed:
            print(f"rank 0 is gone, and this rank failed: {error!r}", file=sys.stderr)

    def _live(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._life, selectors.EVENT_READ)
        try:
            while not self._will_close(selector):
                if self._check is not None:
                    self._check()
            self._stopped.set()
        except Closed:
            os._exit(1)
        except KilnError as error:  # the main thread may wait for a device that never ends
            self._tell(error, expected=True)
            os._exit(1)

    def _will_close(self, selector: selectors.BaseSelector) -> bool:
        """Tell rank 0 that this rank is alive; return whether rank 0 has announced that it closes.

        Raises Closed if the connection was closed without that message.
        """
        with suppress(Closed):  # rank 0 may have sent the message and closed: it is read below
            self._life.send(Kind.ALIVE)
        if not selector.select(_ALIVE_SECONDS):
            return False
        self._life.receive()
        return True
