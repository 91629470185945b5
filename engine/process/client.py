"""The API process's client of the engine: requests in, token streams out, on one event loop.

    starting --Ready--> ready --exit, Failed, close--> over

A stream ends in one of three ways: all its requests finish, the reader closes it (which aborts its
unfinished requests in the engine), or it raises EngineDeadError: RequestLostError if the engine
ended by itself. ``adapters`` loads and unloads LoRA adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kiln.engine import errors
from kiln.engine.distributed.held_for import HeldFor
from kiln.engine.distributed.process_state import STOPPED_LIMIT
from kiln.engine.errors import EngineDeadError, KilnError, RequestError, RequestLostError
from kiln.engine.process import wire
from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.child import EngineProcess, outputs_address, requests_address
from kiln.engine.process.step_ring import StepRing
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.requests.request import NewRequest, TokenOutput

_WATCH_EVERY = 0.2  # seconds between checks of the process
_LAST_MESSAGE = 2.0  # seconds to wait for the message of a process that ended by itself
_MOST_JOINED = 64  # messages that are read before the readers of streams run
_STOP_GRACE = 2.0  # seconds for the current step to finish at shutdown

_REFUSALS = {
    "QueueFullError": errors.QueueFullError,
    "AdapterNotFoundError": errors.AdapterNotFoundError,
    "ContextLengthError": errors.ContextLengthError,
}  # by the name of the class; others are RequestError

ShowProgress = Callable[[str, int, int], None]  # stage, done, total


class EngineClient:
    """The client of one engine process; use it as an async context manager, on one event loop.

    An engine that is stopped for ``stopped_limit`` seconds, or gives no sign of a step for
    ``stall_limit`` seconds while it has requests, is taken for dead. None: a step may last forever.
    """

    def __init__(
        self,
        process: EngineProcess,
        on_progress: ShowProgress | None = None,
        *,
        stopped_limit: float = STOPPED_LIMIT,
        stall_limit: float | None = None,
        steps: StepRing | None = None,
    ) -> None:
        self._process = process
        self._on_progress = on_progress
        self._stopped_limit, self._stall_limit = stopped_limit, stall_limit
        self._context = zmq.asyncio.Context(io_threads=1)
        # Sends must work in ``finally`` blocks, so they are plain calls that never block.
        self._requests = zmq.Context(self._context).socket(zmq.PUSH)
        self._outputs = self._context.socket(zmq.PULL)
        self._streams: dict[str, TokenStream] = {}
        self._reached: dict[TokenStream, None] = {}  # by messages, and not woken yet
        self.adapters = AdapterCalls(self._send)
        self.steps = StepRing() if steps is None else steps
        self._encode = msgspec.msgpack.Encoder().encode
        self._info: wire.ModelInfo | None = None
        self._stats: dict[str, Any] = {}
        self._error: KilnError | None = None
        self._changed = asyncio.Event()  # ready, or over
        self._over = asyncio.Event()
        self._heard = False  # a message, since _watch has looked
        self._cpu_seconds = 0.0  # of the process, when _watch has looked
        self._frozen = False
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self.has_ended = False  # ``close`` has seen the end of the process and its ranks

    async def __aenter__(self) -> EngineClient:
        """Open the sockets, and start to listen and to watch the process."""
        for socket in (self._requests, self._outputs):
            socket.set_hwm(0)
            socket.linger = 0
        # ZeroMQ queues what is sent on a socket that connects, also before the other side has
        # bound. A socket that binds would refuse messages until the engine has connected.
        self._requests.connect(requests_address(self._process.folder))
        self._outputs.bind(outputs_address(self._process.folder))
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        return self

    async def __aexit__(self, *error: object) -> None:
        """Do what ``close`` does."""
        await self.close()

    async def close(self) -> None:
        """Stop the engine and release everything; open streams end with an error. May be repeated.

        The process and its ranks have ended afterwards, unless ``has_ended`` is false.
        """
        if self._closed:
            return
        self._closed = True
        self._send(wire.Stop())
        self.fail(EngineDeadError("the engine was stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        grace = _STOP_GRACE if self._info and not self._frozen else 0.0
        self.has_ended = await asyncio.to_thread(self._process.stop, grace)
        for socket in (self._requests, self._outputs):
            socket.close(linger=0)
        self._context.term()

    @property
    def is_ready(self) -> bool:
        """Whether the engine accepts requests."""
        return self._info is not None and not self._over.is_set()

    @property
    def is_alive(self) -> bool:
        """Whether the engine process is running, loading or ready."""
        return not self._over.is_set()

    @property
    def has_served(self) -> bool:
        """Whether the engine is ready, or was before it ended."""
        return self._info is not None

    @property
    def model_info(self) -> wire.ModelInfo:
        """The served model. Raises EngineDeadError before the engine is ready."""
        if self._info is None:
            raise self._error or EngineDeadError("the engine is still loading the model")
        return self._info

    def stats(self) -> dict[str, Any]:
        """Return the engine's latest counts without waiting; they are under a second old."""
        return self._stats

    def watch_steps(self) -> None:
        """Let the engine send the records of its steps to ``steps`` for the next half minute."""
        if self.is_ready:
            self.steps.watch(lambda seconds: self._send(wire.WatchSteps(seconds)))

    async def wait_ready(self) -> wire.ModelInfo:
        """Wait until the model is loaded. Raises the error of a failed load."""
        await self._changed.wait()
        if self._error is not None:
            raise self._error
        return self.model_info

    async def wait_over(self) -> KilnError:
        """Wait until the engine has ended and return why."""
        await self._over.wait()
        return self._error or EngineDeadError("the engine was stopped")

    def stream(self, *requests: NewRequest) -> TokenStream:
        """Send requests and return one stream of all their tokens.

        Raises EngineDeadError if no engine is running. The stream raises RequestError if the engine
        rejects a request.
        """
        self._check_ready()
        stream = TokenStream([request.request_id for request in requests], self._abort)
        for request in requests:
            self._streams[request.request_id] = stream
            self._send(wire.Add(request))
        return stream

    def reset_prefix_cache(self) -> None:
        """Let the engine forget the prefix index before it reads any later request.

        Raises EngineDeadError if no engine is running.
        """
        self._check_ready()
        self._send(wire.ResetPrefixCache())

    def fail(self, error: KilnError) -> None:
        """End every open stream with an error, and accept no more requests."""
        if self._over.is_set():
            return
        self._error = error
        self._over.set()
        self._changed.set()
        for stream in {id(stream): stream for stream in self._streams.values()}.values():
            stream.put(error)
        self._streams.clear()
        self.adapters.fail(error)

    def _check_ready(self) -> None:
        if not self.is_ready:
            raise EngineDeadError(str(self._error or "the engine is still loading the model"))

    def _send(self, message: wire.ToEngine) -> None:
        """Queue a message without limit; _watch ends the streams of an engine that is gone."""
        self._requests.send(self._encode(message), zmq.NOBLOCK)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if self._streams.pop(request_id, None) is not None:
                self._send(wire.Abort(request_id))

    async def _listen(self) -> None:
        """Read messages. Those that have queued up are joined, so that readers catch up at once."""
        decode = msgspec.msgpack.Decoder(wire.ToClient).decode
        queued: zmq.Socket[bytes] = zmq.Socket.shadow(self._outputs.underlying)
        while True:
            self._take(decode(await self._outputs.recv()))
            with contextlib.suppress(zmq.Again):
                for _ in range(_MOST_JOINED):
                    self._take(decode(queued.recv(zmq.NOBLOCK)))
            reached, self._reached = self._reached, {}
            for stream in reached:
                stream.wake()
            await asyncio.sleep(0)  # recv of a queued message does not yield

    def _take(self, message: wire.ToClient) -> None:
        """Act on a message of the engine."""
        self._heard = True
        match message:
            case wire.Outputs(outputs):
                for output in outputs:
                    self._give(output.request_id, output, output.finish_reason is not None)
            case wire.Refused(request_id, kind, text, param):
                refusal = _REFUSALS.get(kind, RequestError)(text, param)
                self._give(request_id, refusal, last=True)
            case wire.Adapters(infos):
                self.adapters.adapters = {info.name: info for info in infos}
            case wire.JobDone():
                self.adapters.end(message)
            case wire.Stats(values):
                self._stats = values
            case wire.Steps(records):
                self.steps.add(records)
            case wire.Progress(stage, done, total):
                if self._on_progress is not None:
                    self._on_progress(stage, done, total)
            case wire.Ready(info):
                self._info = info
                self.steps.begin_engine()
                self._changed.set()
            case wire.Failed():
                self.fail(_failure(message, loading=self._info is None))

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the streams if a task failed: they would wait forever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(RequestLostError(f"the engine's messages cannot be read: {error!r}"))

    def _give(self, request_id: str, item: TokenOutput | RequestError, last: bool) -> None:
        """Pass an item to its stream; drop it if the stream was closed."""
        streams = self._streams
        stream = streams.pop(request_id, None) if last else streams.get(request_id)
        if stream is not None:
            stream.queue(item)
            self._reached[stream] = None

    async def _watch(self) -> None:
        """Detect that the process exited or froze, after reading its last messages."""
        stopped, silent = HeldFor(), HeldFor()
        while self._process.exit_code is None:
            await asyncio.sleep(_WATCH_EVERY)
            if stopped.look(self._process.is_stopped) > self._stopped_limit:
                self._freeze(f"was stopped (SIGSTOP) for {self._stopped_limit:g} s")
                return
            works = self._shows_work()
            limit = math.inf if self._stall_limit is None else self._stall_limit
            if silent.look(bool(self._streams) and not works) > limit:
                self._freeze(f"has made no step for {limit:g} s with requests in flight")
                return
        code = self._process.exit_code
        # Its last message, which says more, may still be on the way: a killed process sends none.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), _WATCH_EVERY if code < 0 else _LAST_MESSAGE)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        self.fail(RequestLostError(f"the engine process {how}; requests in flight are lost"))

    def _shows_work(self) -> bool:
        """Whether the engine has said something, or has computed, since the last call.

        A message comes after each step, and on a GPU no step takes long. On a CPU, a step of a
        large model may take any time, and uses the processor all the while.
        """
        heard, self._heard = self._heard, False
        before, self._cpu_seconds = self._cpu_seconds, self._process.cpu_seconds
        on_cpu = self._info is not None and self._info.device == "cpu"
        return heard or (on_cpu and self._cpu_seconds - before > _WATCH_EVERY / 10)

    def _freeze(self, how: str) -> None:
        """Take the process, which still runs, for dead."""
        self._frozen = True
        self.fail(RequestLostError(f"the engine process {how}; requests in flight are lost"))


def _failure(failed: wire.Failed, loading: bool) -> KilnError:
    """Return the error that ended the engine: a ConfigError, or EngineDeadError."""
    if loading and failed.expected:
        return errors.loading_error(failed.kind, failed.message)
    return RequestLostError(f"the engine stopped on {failed.kind}: {failed.message}")
