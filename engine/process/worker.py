"""The engine process: load the model, then step while there is work, and sleep while there is not.

``kiln.engine.process.child`` starts ``main``. Its messages go through the sockets, its tracebacks
to stderr.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from kiln.cache.env import EnvError
from kiln.engine.config import EngineConfig
from kiln.engine.config_forms import read_config_text
from kiln.engine.distributed.logs import configure
from kiln.engine.errors import KilnError, RequestError, explain_import
from kiln.engine.process import wire
from kiln.engine.process.child import outputs_address, requests_address
from kiln.engine.requests.adapter_job import LoadAdapter, UnloadAdapter
from kiln.engine.requests.request import NewRequest
from kiln.jit_kernels.declare.errors import KernelError

if TYPE_CHECKING:
    from kiln.engine.core import EngineCore  # importing it takes seconds: see load_core

_IDLE_POLL = 1000  # milliseconds to wait for a message when idle
_JOB_POLL = 10  # the same while an adapter is being loaded or unloaded
_REPORT_EVERY = 0.2  # seconds between reports while there is work
_STUCK = 2.0  # seconds for the loop to notice that another rank is gone
_LINGER = 1000  # milliseconds to send the last messages at exit

logger = logging.getLogger(__name__)


Progress = Callable[[str, int, int], None]
Load = Callable[[EngineConfig, Progress], tuple["EngineCore", wire.ModelInfo]]


class Worker:
    """The loop around a core, and its two sockets."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context(io_threads=1)
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        for socket in (self._inbox, self._outbox):
            socket.set_hwm(0)  # the API process limits the number of requests
            socket.linger = _LINGER
        self._inbox.bind(requests_address(folder))
        self._outbox.connect(outputs_address(folder))
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.ToEngine).decode
        self._stopping = False
        self._num_steps = 0
        self._last_report = 0.0
        self._last_stats: dict[str, float] = {}
        self._watched_until = 0.0  # by who reads the records of steps

    def send(self, message: wire.ToClient) -> None:
        """Queue a message to the client without waiting."""
        self._outbox.send(self._encode(message), zmq.NOBLOCK)

    def serve(self, core: EngineCore) -> None:
        """Run requests until told to stop.

        The core handles errors that one request causes; an error that it raises ends the loop.
        """
        while not self._stopping:
            idle = _JOB_POLL if core.adapters.are_pending else _IDLE_POLL
            self._receive(core, 0 if core.has_work else idle)
            core.check_ranks()
            if core.adapters.are_pending:
                self._end_jobs(core)
            if core.has_work:
                outputs = core.step()
                self._num_steps += 1
                if outputs:
                    self.send(wire.Outputs(outputs, self._num_steps))
            self.report(core)

    def close(self, linger: int = _LINGER) -> None:
        """Send the queued messages, within ``linger`` milliseconds, and close the sockets.

        -1: however long the parent, which may still be starting, takes to read them.
        """
        self._context.destroy(linger=linger)

    def _receive(self, core: EngineCore, timeout: int) -> None:
        """Handle all queued messages; wait up to ``timeout`` milliseconds for the first."""
        if not self._inbox.poll(timeout):
            return
        while True:
            try:
                message = self._decode(self._inbox.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            match message:
                case wire.Add(request):
                    self._add(core, request)
                case wire.Abort(request_id):
                    core.abort(request_id)
                case wire.Load(job) | wire.Unload(job):
                    self._begin_job(core, job)
                case wire.ResetPrefixCache():
                    core.reset_prefix_cache()
                case wire.WatchSteps(seconds):
                    self._watched_until = time.monotonic() + seconds
                case wire.Stop():
                    self._stopping = True

    def _add(self, core: EngineCore, request: NewRequest) -> None:
        try:
            core.add(request)
        except RequestError as error:
            kind = type(error).__name__
            self.send(wire.Refused(request.request_id, kind, str(error), error.param))

    def _begin_job(self, core: EngineCore, job: LoadAdapter | UnloadAdapter) -> None:
        try:
            core.adapters.begin(job)
        except KilnError as error:
            self.send(wire.JobDone(job.job_id, type(error).__name__, str(error)))

    def _end_jobs(self, core: EngineCore) -> None:
        """Send the results of jobs, behind the adapters that there are now."""
        results = core.adapters.end()
        if results:
            self.send(wire.Adapters(core.adapters.infos))
        for job_id, error in results:
            kind = None if error is None else type(error).__name__
            self.send(wire.JobDone(job_id, kind, "" if error is None else str(error)))

    def report(self, core: EngineCore) -> None:
        """Report the counts if they changed: at once when idle, else a few times a second."""
        now = time.monotonic()
        if core.has_work and now - self._last_report < _REPORT_EVERY:
            return
        self._last_report = now
        stats = dataclasses.asdict(core.stats())
        if core.has_work:
            self.send(wire.Outputs([], self._num_steps))
        if stats != self._last_stats:
            self.send(wire.Stats(stats))
            self._last_stats = stats
        if now < self._watched_until and (records := core.step_log.take()):
            self.send(wire.Steps(records))


def _leave_with_parent(folder: Path) -> None:
    """Exit when the parent has exited: however it ends, the pipe on stdin closes."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        time.sleep(_LINGER / 1000)  # an orderly stop exits during this time
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run(load: Load, arguments: list[str]) -> int:
    """Load a core and serve it; ``arguments`` are the socket folder and the configuration.

    Returns the exit code: 0 after an orderly stop, 1 if the model could not be loaded or a step
    failed; the client was told why in both cases.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent drains, then stops this
        signal.signal(number, signal.SIG_IGN)
    folder = Path(arguments[0])
    _leave_with_parent(folder)
    worker, linger = Worker(folder), _LINGER
    try:
        config = read_config_text(arguments[1])
        configure(config.logs, "engine")
        core, info = load(
            config,
            lambda stage, done, total: worker.send(wire.Progress(stage, done, total)),
        )
        gc.collect()
        gc.freeze()  # the model's objects live until exit: exclude them from collections
        worker.report(core)
        worker.send(wire.Adapters(core.adapters.infos))
        worker.send(wire.Ready(info))
        worker.serve(core)
    except Exception as cause:
        error = (explain_import(cause) if isinstance(cause, ImportError) else None) or cause
        expected = isinstance(error, KilnError | KernelError | EnvError)
        if not expected:
            logger.exception("the engine stopped on an unexpected error")
        worker.send(wire.Failed(str(error) or repr(error), type(error).__name__, expected))
        linger = -1
        return 1
    finally:
        worker.close(linger)
    return 0


def _exit_later(error: KilnError) -> None:
    """Exit soon when another rank is gone, even if a call that waits for it never returns."""

    def exit_now() -> None:
        logger.critical("the engine cannot stop by itself: %s", error)
        os._exit(1)

    timer = threading.Timer(_STUCK, exit_now)
    timer.daemon = True
    timer.start()


def load_core(config: EngineConfig, progress: Progress) -> tuple[EngineCore, wire.ModelInfo]:
    """Create the real core and report its progress."""
    progress("importing torch", 0, 1)
    # Imported here, after the message: these imports take seconds.
    import torch

    from kiln.engine.core import EngineCore, load_runner
    from kiln.engine.text.vocabulary import vocabulary_of
    from kiln.jit_kernels.compile.ready import ready_guard

    progress("importing torch", 1, 1)
    # Leave one core to the API process: at each op, torch waits for the slowest of its threads.
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, min(torch.get_num_threads(), cores - 1)))
    # Read meanwhile, because nothing else runs in this process while llguidance does so.
    vocabulary = ThreadPoolExecutor(1).submit(vocabulary_of, config.model)
    runner = load_runner(config, progress, _exit_later)
    info = wire.ModelInfo(
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
        dtype=str(runner.loaded.dtype).removeprefix("torch."),
        device=str(runner.device),
        kernels=runner.loaded.kernels,
        budget=f"{runner.loaded.limits.budget} tokens ({runner.loaded.budget_reason})",
        embedder=runner.embedder,
        image_token_ids=sorted(runner.image_token_ids),
    )
    ready_guard().declare_ready()  # a kernel that is compiled or loaded from here on is too late
    return EngineCore(config, runner=runner, vocabulary=vocabulary.result), info


def main(arguments: list[str]) -> int:
    """Run the engine process."""
    return run(load_core, arguments)
