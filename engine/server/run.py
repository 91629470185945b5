"""Run the server: listen at once, drain on a signal, release everything.

signal            readiness 503, no new connections; requests in flight continue
timeout, or a second signal    the rest get an error event, then the connections close
engine ended      its requests get an error event; readiness 503 until it is restarted
engine given up   the connections close, and exit code 1
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI

from kiln.engine.errors import EngineDeadError, KilnError
from kiln.engine.process.client import EngineClient
from kiln.engine.process.supervisor import Supervisor
from kiln.engine.server.connection import Connection
from kiln.engine.server.middleware import MAX_HEADER_BYTES

_FLUSH_SECONDS = 2.0  # for the last error events to reach the clients

logger = logging.getLogger(__name__)


class Seconds(NamedTuple):
    """How long an idle connection is kept, and how long a shutdown waits for requests."""

    keep_alive: float
    shutdown: float


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers, which exit with the signal's code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: ``serve`` handles signals."""
        yield


async def serve(
    app: FastAPI,
    engine: Supervisor,
    listener: socket.socket,
    seconds: Seconds,
    on_ready: Callable[[], None],
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve until a signal. Raises the error of a failed load, or of an engine that is given up.

    ``on_ready`` is called after the model is loaded; until then readiness is 503. ``tls`` None:
    connections are plain HTTP.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection needs a descriptor
    server = _Server(_uvicorn_config(app, seconds.keep_alive, tls))
    signals = _StopSignals()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    over = asyncio.create_task(engine.wait_over())
    others = [
        asyncio.create_task(signals.first.wait()),
        asyncio.create_task(_announce(engine.client, on_ready)),
    ]
    try:
        await asyncio.wait((serving, over, others[0]), return_when=asyncio.FIRST_COMPLETED)
        app.state.serving.draining = True
        engine.end_restarts()
        server.should_exit = True
        died = over.result() if over.done() else None
        if died is None:
            await drain(server, serving, signals.second, seconds.shutdown)
            engine.client.fail(EngineDeadError("the server is shutting down"))
        await asyncio.wait((serving,), timeout=_FLUSH_SECONDS)
        server.force_exit = True
        await serving
    finally:
        for task in (over, *others):
            task.cancel()
    if died is not None:
        raise died


def _uvicorn_config(app: FastAPI, keep_alive: float, tls: ssl.SSLContext | None) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=keep_alive,  # type: ignore[arg-type]  # a float works too
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )
    config.load()  # which would make a context of files
    config.ssl = tls
    return config


async def drain(
    server: uvicorn.Server, serving: asyncio.Task[None], second: asyncio.Event, timeout: float
) -> None:
    """Wait until all requests in flight finish, the timeout expires, or a second signal arrives."""
    in_flight, begun = set(server.server_state.tasks), time.monotonic()
    logger.warning(
        "draining: %d requests in flight have %g s to finish; a second signal stops at once",
        *(len(in_flight), timeout),
    )
    again = asyncio.create_task(second.wait())
    await asyncio.wait((serving, again), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    cut_off = sum(not request.done() for request in in_flight)
    logger.warning(
        "drained for %.1f s: %d requests have finished, %d were cut off",
        *(time.monotonic() - begun, len(in_flight) - cut_off, cut_off),
    )


async def _announce(client: EngineClient, on_ready: Callable[[], None]) -> None:
    with contextlib.suppress(KilnError):  # ``serve`` raises it
        await client.wait_ready()
        on_ready()


class _StopSignals:
    """Counts SIGINT and SIGTERM: the first starts a drain, the second stops at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._count)

    def _count(self) -> None:
        (self.second if self.first.is_set() else self.first).set()
