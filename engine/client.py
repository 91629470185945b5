"""The API process's hold on the engine: requests in, token streams out, all on one event loop.

    starting --Ready--> ready --exit, Failed, close--> over

Every stream ends in one of three ways: each of its requests finished, the reader closed it (what
is left is aborted in the engine), or EngineDeadError is raised from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType

import msgspec
import zmq
import zmq.asyncio

from kiln.engine import errors, wire
from kiln.engine.config import EngineConfig
from kiln.engine.errors import EngineDeadError, KilnError, RequestError
from kiln.engine.process import EngineProcess
from kiln.engine.request import NewRequest, TokenOutput
from kiln.engine.token_stream import TokenStream

STOPPED_LIMIT = 15.0  # seconds that a stopped (SIGSTOP) engine may take to go on
_WATCH_EVERY = 0.2  # seconds between looks at the process
_STOP_GRACE = 2.0  # seconds that an engine told to stop may take for the step under way

ShowProgress = Callable[[wire.Progress], None]


class EngineClient:
    """Talks to one engine process; use it as an async context manager, on one event loop."""

    def __init__(
        self,
        process: EngineProcess,
        on_progress: ShowProgress | None = None,
        *,
        stopped_limit: float = STOPPED_LIMIT,
    ) -> None:
        self._process = process
        self._on_progress = on_progress
        self._stopped_limit = stopped_limit
        self._context = zmq.asyncio.Context(io_threads=1)
        self._streams: dict[str, TokenStream] = {}
        self._encode = msgspec.msgpack.Encoder().encode
        self._info: wire.ModelInfo | None = None
        self._stats: dict[str, float] = {}
        self._error: KilnError | None = None
        self._changed = asyncio.Event()  # ready, or over
        self._over = asyncio.Event()
        self._last_message = time.monotonic()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, config: EngineConfig, on_progress: ShowProgress | None = None
    ) -> AsyncIterator[EngineClient]:
        """Start an engine and yield its client when it is ready. Raises what loading raised."""
        async with cls(EngineProcess.spawn(config), on_progress) as client:
            await client.wait_ready()
            yield client

    async def __aenter__(self) -> EngineClient:
        """Open the sockets and begin to listen and to watch the process."""
        # Sends must work from ``finally`` blocks, so they are plain calls that never wait.
        self._requests = zmq.Context(self._context).socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        for socket in (self._requests, self._outputs):
            socket.set_hwm(0)
            socket.linger = 0
        self._requests.bind(self._process.requests_address)
        self._outputs.bind(self._process.outputs_address)
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the engine and release everything; streams that are open end with an error."""
        self._send(wire.Stop())
        self.fail(EngineDeadError("the engine was stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._process.stop, _STOP_GRACE if self._info else 0.0)
        for socket in (self._requests, self._outputs):
            socket.close(linger=0)
        self._context.term()

    @property
    def is_ready(self) -> bool:
        """Whether requests are served now."""
        return self._info is not None and not self._over.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the engine process exists, loading or ready."""
        return not self._over.is_set()

    @property
    def model_info(self) -> wire.ModelInfo:
        """What is served. Raises EngineDeadError before the engine is ready."""
        if self._info is None:
            raise self._error or EngineDeadError("the engine is still loading the model")
        return self._info

    @property
    def num_in_flight(self) -> int:
        """How many requests were sent and have not finished."""
        return len(self._streams)

    @property
    def seconds_without_progress(self) -> float:
        """How long the engine has owed an answer and given no sign; 0 when it owes none."""
        return time.monotonic() - self._last_message if self._streams else 0.0

    def stats(self) -> dict[str, float]:
        """Return the engine's latest counts: at most a fraction of a second old, no waiting."""
        return self._stats

    async def wait_ready(self) -> wire.ModelInfo:
        """Wait until the model is loaded. Raises the error that loading ended with."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        return self.model_info

    async def wait_over(self) -> KilnError:
        """Wait until the engine is gone and return why."""
        await self._over.wait()
        return self._error or EngineDeadError("the engine was stopped")

    def stream(self, *requests: NewRequest) -> TokenStream:
        """Send requests and return the one stream of their tokens.

        Raises EngineDeadError if there is no engine; the stream raises RequestError if the engine
        refuses one of them.
        """
        if not self.is_ready:
            raise self._error or EngineDeadError("the engine is still loading the model")
        stream = TokenStream([request.request_id for request in requests], self._abort)
        if not self._streams:
            self._last_message = time.monotonic()
        for request in requests:
            self._streams[request.request_id] = stream
            self._send(wire.Add(request))
        return stream

    def fail(self, error: KilnError) -> None:
        """End every open stream with an error, and take no more requests."""
        if self._over.is_set():
            return
        self._error = error
        self._over.set()
        self._changed.set()
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.put(error)
        self._streams.clear()

    def _send(self, message: wire.ToEngine) -> None:
        # The queue has no bound, so Again means that nobody is connected: the engine is gone, and
        # _watch is about to end the streams.
        with contextlib.suppress(zmq.Again):
            self._requests.send(self._encode(message), zmq.NOBLOCK)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._send(wire.Abort(request_id))

    async def _listen(self) -> None:
        decode = wire.to_client_decoder().decode
        while True:
            message = decode(await self._outputs.recv())
            self._last_message = time.monotonic()
            match message:
                case wire.Outputs(outputs):
                    for output in outputs:
                        self._give(output.request_id, output, output.finish_reason is not None)
                    await asyncio.sleep(0)  # reading a waiting message does not: readers take turns
                case wire.Refused(request_id, kind, text, param):
                    kinds = {"QueueFullError": errors.QueueFullError}
                    refusal = kinds.get(kind, RequestError)(text, param)
                    self._give(request_id, refusal, last=True)
                case wire.Stats(values):
                    self._stats = values
                case wire.Progress():
                    if self._on_progress is not None:
                        self._on_progress(message)
                case wire.Ready(info):
                    self._info = info
                    self._changed.set()
                case wire.Failed():
                    self.fail(_failure(message, loading=self._info is None))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the streams when a task broke: they would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(EngineDeadError(f"the engine's messages cannot be read: {error!r}"))

    def _give(self, request_id: str, item: TokenOutput | RequestError, last: bool) -> None:
        """Pass an item to its stream; one whose reader has left is dropped."""
        streams = self._streams
        stream = streams.pop(request_id, None) if last else streams.get(request_id)
        if stream is not None:
            stream.put(item)

    async def _watch(self) -> None:
        """Notice that the process is gone or stopped; what it said last is heard first."""
        stopped = 0.0
        while self._process.exit_code is None:
            await asyncio.sleep(_WATCH_EVERY)
            stopped = stopped + _WATCH_EVERY if self._process.is_stopped else 0.0
            if stopped > self._stopped_limit:
                self.fail(
                    EngineDeadError(
                        f"the engine process was stopped (SIGSTOP) for {self._stopped_limit:g} s; "
                        "requests in flight are lost"
                    )
                )
                return
        await asyncio.sleep(_WATCH_EVERY)
        code = self._process.exit_code
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self.fail(EngineDeadError(f"the engine process {how}; requests in flight are lost"))


def _failure(failed: wire.Failed, loading: bool) -> KilnError:
    """Rebuild what ended the engine: a setting that cannot be served, or a death."""
    if loading and failed.expected:
        kinds = {"ModelError": errors.ModelError, "SealedMiss": errors.SealedCacheError}
        return kinds.get(failed.kind, errors.ConfigError)(failed.message)
    return EngineDeadError(f"the engine stopped on {failed.kind}: {failed.message}")
