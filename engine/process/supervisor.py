"""Keep an engine serving: start a new process when one has ended or frozen.

    loading --> serving --the engine ends--> restarting --> serving …
       |                                         |
       +------ it cannot be loaded --> over <----+-- --max-restarts, or the server stops

Requests of the engine that ended were told so, and are not sent to the next one: one of them may
have ended it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kiln.engine.errors import EngineDeadError, KilnError
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient, ShowProgress
from kiln.engine.process.restored_adapters import RestoredAdapters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When an engine is restarted. Times are in seconds.

    ``max_restarts``: in a row, without ``healthy`` seconds of service between; 0: never. The first
    waits for ``delay``, each of the others twice as long as the one before, at most ``max_delay``.
    ``stall``: an engine with requests that makes no step for so long is taken for dead.
    """

    max_restarts: int = 3
    delay: float = 1.0
    max_delay: float = 30.0
    healthy: float = 300.0
    stall: float = 300.0

    def delay_of(self, restart: int) -> float:
        """Return the time before the restart of this number in a row; the first is 1."""
        return float(min(self.delay * 2.0 ** (restart - 1), self.max_delay))


class Supervisor:
    """The engine of a server, over all its lives; use it as an async context manager.

    ``client`` is that of the process that serves, and of the last one that did while there is none.
    ``num_restarts``: the processes that were started since the first.
    """

    def __init__(
        self,
        process: EngineProcess,
        spawn: Callable[[], EngineProcess],
        policy: RestartPolicy,
        on_progress: ShowProgress | None = None,
    ) -> None:
        self._spawn, self._policy = spawn, policy
        self.client = EngineClient(process, on_progress, stall_limit=policy.stall)
        self.num_restarts = 0
        self._next: EngineClient | None = None  # while it loads
        self._adapters = RestoredAdapters()
        self._served_since = 0.0
        self._stopping = asyncio.Event()  # no restart from now on
        self._run: asyncio.Task[KilnError]

    async def __aenter__(self) -> Supervisor:
        """Begin to watch the first process."""
        await self.client.__aenter__()
        self._run = asyncio.create_task(self._supervise(), name="kiln-supervisor")
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop the engine, or the restart that is under way."""
        self.end_restarts()
        self.client.fail(EngineDeadError("the engine was stopped"))
        await asyncio.gather(self._run, return_exceptions=True)
        await self.client.close()

    @property
    def is_restarting(self) -> bool:
        """Whether a new process is about to replace one that has served."""
        return self.client.has_served and not self.client.is_alive and not self._run.done()

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves or will: it is loading, ready or restarting."""
        return self.client.is_alive or self.is_restarting

    def stats(self) -> dict[str, Any]:
        """Return the engine's latest counts without waiting, and those of the supervisor."""
        counts = self.client.stats() if self.client.is_alive else {}
        return {**counts, "engine_restarts": self.num_restarts}

    async def wait_over(self) -> KilnError:
        """Wait until the engine has ended for good, and return why."""
        return await asyncio.shield(self._run)

    def end_restarts(self) -> None:
        """Do not start the engine again from now on; a restart under way is given up."""
        self._stopping.set()
        if self._next is not None:
            self._next.fail(EngineDeadError("the server is shutting down"))

    async def _supervise(self) -> KilnError:
        """Restart the engine each time that it ends; return why it is not started again."""
        with contextlib.suppress(KilnError):
            await self.client.wait_ready()
        in_a_row, self._served_since = 0, time.monotonic()
        while True:
            why: KilnError = await self.client.wait_over()
            self._adapters.remember(self.client.adapters)
            if time.monotonic() - self._served_since >= self._policy.healthy:
                in_a_row = 0
            while self._may_restart(why, in_a_row):
                in_a_row += 1
                try:
                    await self._restart(why, in_a_row)
                    break
                except KilnError as error:
                    why = error
                except Exception as error:
                    why = EngineDeadError(f"the engine cannot be started again: {error!r}")
            else:
                return why

    def _may_restart(self, why: KilnError, in_a_row: int) -> bool:
        if not self.client.has_served or self._stopping.is_set():
            return False
        most = self._policy.max_restarts
        if in_a_row < most:
            return True
        if most:
            logger.error("not started again after %d restarts in a row: %s", in_a_row, why)
        return False

    async def _restart(self, why: KilnError, in_a_row: int) -> None:
        """Replace the process that has ended. Raises the error of a process that cannot serve."""
        delay, most = self._policy.delay_of(in_a_row), self._policy.max_restarts
        logger.error("%s", why)
        logger.warning(
            "the engine is started again in %g s: restart %d of at most %d in a row",
            *(delay, in_a_row, most),
        )
        await self.client.close()  # its memory must be free before the next process asks for it
        if not self.client.has_ended:
            self.end_restarts()
            raise EngineDeadError(
                "the engine process was killed and does not end: its device's driver may hold it; "
                "restart the machine if it stays"
            )
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)
            raise EngineDeadError("the server is shutting down")
        begun = time.monotonic()
        self.num_restarts += 1
        client = await self._started()
        self.client, self._served_since = client, time.monotonic()
        logger.warning(
            "the engine serves again after %.1f s%s",
            *(self._served_since - begun, self._adapters.summary),
        )

    async def _started(self) -> EngineClient:
        """Return the client of a new process that serves. Raises the error of one that cannot."""
        client = self._next = EngineClient(
            self._spawn(), stall_limit=self._policy.stall, steps=self.client.steps
        )
        try:
            await client.__aenter__()
            await client.wait_ready()
            await self._adapters.restore(client.adapters)
        except BaseException:
            await client.close()
            raise
        finally:
            self._next = None
        return client
