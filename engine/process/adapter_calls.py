"""The client's side of loading and unloading LoRA adapters."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable

from kiln.engine import errors
from kiln.engine.errors import AdapterError, EngineDeadError, KilnError
from kiln.engine.process import wire
from kiln.engine.requests.adapter_job import AdapterInfo, LoadAdapter, UnloadAdapter

_ERRORS: dict[str, type[KilnError]] = {
    "AdapterBusyError": errors.AdapterBusyError,
    "AdapterNotFoundError": errors.AdapterNotFoundError,
    "AdapterPathError": errors.AdapterPathError,
}  # by the name of the class; others are AdapterError


class AdapterCalls:
    """Sends jobs to the engine, and wakes their callers. ``adapters`` are those of the engine."""

    def __init__(self, send: Callable[[wire.Load | wire.Unload], None]) -> None:
        self.adapters: dict[str, AdapterInfo] = {}
        self._send = send
        self._waiting: dict[str, asyncio.Future[dict[str, AdapterInfo]]] = {}
        self._error: KilnError | None = None  # what ended the engine

    async def load(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        """Load an adapter. Raises AdapterError, AdapterPathError, AdapterBusyError."""
        job = LoadAdapter(uuid.uuid4().hex, name, path, pinned)
        return (await self._run(job.job_id, wire.Load(job)))[name]

    async def unload(self, name: str, timeout_s: float) -> None:
        """Unload an adapter. Raises AdapterNotFoundError, AdapterBusyError, AdapterPathError."""
        job = UnloadAdapter(uuid.uuid4().hex, name, timeout_s)
        await self._run(job.job_id, wire.Unload(job))

    def end(self, done: wire.JobDone) -> None:
        """Wake the caller of a job; it may have gone."""
        future = self._waiting.get(done.job_id)
        if future is None or future.done():
            return
        if done.kind is None:
            future.set_result(self.adapters)
        else:
            future.set_exception(_ERRORS.get(done.kind, AdapterError)(done.message))

    def fail(self, error: KilnError) -> None:
        """End all jobs with the error that ended the engine, and accept no more."""
        self._error = error
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    async def _run(self, job_id: str, message: wire.Load | wire.Unload) -> dict[str, AdapterInfo]:
        """Send a job, wait for its end, and return the adapters of that moment.

        A caller that is cancelled leaves the job running. Raises EngineDeadError.
        """
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        loop = asyncio.get_running_loop()
        future: asyncio.Future[dict[str, AdapterInfo]] = loop.create_future()
        self._waiting[job_id] = future
        try:
            self._send(message)
            return await future
        finally:
            del self._waiting[job_id]
