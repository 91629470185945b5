"""Loading and unloading LoRA adapters while requests run.

A load reads and checks its files in a thread; the adapter is published between two steps. An unload
refuses new requests at once, and ends when those that it has are done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kiln.engine.errors import AdapterBusyError, AdapterError, AdapterPathError, KilnError
from kiln.engine.requests.adapter_slots import AdapterSlots
from kiln.engine.requests.loaded_adapter import Mover

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter, as clients see it. ``path``: as it was given."""

    name: str
    path: str
    pinned: bool
    max_rank: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter from a folder inside ``lora_root``; a pinned one is never evicted."""

    job_id: str
    name: str
    path: str
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Unload an adapter when its requests have ended; give up after ``timeout_s`` seconds."""

    job_id: str
    name: str
    timeout_s: float


class JobResult(NamedTuple):
    """How a job ended."""

    job_id: str
    error: KilnError | None = None


class AdapterStore(Mover, Protocol):
    """What reads adapters, keeps them in host memory, and copies them to the device."""

    num_slots: int  # adapters that can be on the device
    size: int  # elements of the adapter pool
    sizes: dict[str, int]  # the elements of each adapter in host memory

    def read(self, name: str, path: str) -> Any:
        """Read and check an adapter of ``lora_root``, in any thread. Raises AdapterError."""

    def add(self, packed: Any, /) -> None:
        """Keep what ``read`` returned. Raises AdapterError."""

    def forget(self, name: str) -> None:
        """Free the host memory of an adapter."""

    def info(self, name: str, path: str, *, pinned: bool) -> AdapterInfo:
        """Describe an adapter."""


class AdapterJobs:
    """The adapters of an engine, and the jobs that add and remove some; not thread-safe.

    ``modules``: names and paths of those that the store has already. ``check_name`` raises
    ConfigError for a name and a path that cannot be used; None if adapters never change.
    ``in_flight`` returns the slots of launched steps. Without a store there are no adapters.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        store: AdapterStore | None,
        in_flight: Callable[[], Set[int]],
        *,
        modules: Iterable[tuple[str, str]] = (),
        check_name: Callable[[str, str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._check_name = check_name
        self._slots = slots
        self._store = store
        self._in_flight = in_flight
        self._clock = clock
        self._infos: dict[str, AdapterInfo] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-lora-load")
        self._loads: dict[str, tuple[LoadAdapter, Future[Any]]] = {}  # by name
        self._unloads: list[tuple[UnloadAdapter, float]] = []  # with their deadlines
        for name, path in modules:
            assert store is not None, "adapters need a store"
            slots.add(name, store.sizes[name], pinned=False)
            self._infos[name] = store.info(name, path, pinned=False)
        slots.place_all()

    @property
    def infos(self) -> list[AdapterInfo]:
        """The adapters that take requests, or are being unloaded."""
        return list(self._infos.values())

    @property
    def are_pending(self) -> bool:
        """Whether a job has not ended."""
        return bool(self._loads or self._unloads)

    def begin(self, job: LoadAdapter | UnloadAdapter) -> None:
        """Begin to load or unload an adapter.

        Raises AdapterPathError without ``lora_root``, ConfigError for a name that no request could
        use, AdapterError if it is taken, and AdapterNotFoundError.
        """
        if self._store is None or self._check_name is None:
            raise AdapterPathError(
                "adapters are loaded and unloaded while serving only with --lora-root, the folder "
                "that holds them: start the server with it"
            )
        if isinstance(job, UnloadAdapter):
            self._slots.get(job.name).leaving = True
            self._unloads.append((job, self._clock() + job.timeout_s))
            return
        self._check_name(job.name, job.path)
        if job.name in self._infos or job.name in self._loads:
            raise AdapterError(f"LoRA adapter {job.name!r}: the name is taken: unload it first")
        future = self._thread.submit(self._store.read, job.name, job.path)
        self._loads[job.name] = (job, future)

    def end(self) -> list[JobResult]:
        """Publish what was loaded, free what is no longer used, and return the ended jobs.

        Call it between two steps, and often while jobs are pending.
        """
        if self._store is None:
            return []
        self._slots.collect()
        ended = [
            self._publish(self._store, job)
            for job, future in tuple(self._loads.values())
            if future.done()
        ]
        now, still = self._clock(), []
        for job, deadline in self._unloads:
            if self._slots.remove(job.name, self._in_flight()):
                self._store.forget(job.name)
                del self._infos[job.name]
                ended.append(JobResult(job.job_id))
            elif now >= deadline:
                ended.append(JobResult(job.job_id, self._given_up(job)))
            else:
                still.append((job, deadline))
        self._unloads = still
        return ended

    def _publish(self, store: AdapterStore, job: LoadAdapter) -> JobResult:
        _, future = self._loads.pop(job.name)
        try:
            store.add(future.result())
            try:
                size = store.sizes[job.name]
                self._slots.add(job.name, size, job.pinned, self._in_flight())
            except KilnError:
                store.forget(job.name)
                raise
        except KilnError as error:
            return JobResult(job.job_id, error)
        except Exception as error:  # a fault of one load must not end the engine
            logger.exception("loading LoRA adapter %r failed", job.name)
            return JobResult(job.job_id, AdapterError(f"LoRA adapter {job.name!r}: {error!r}"))
        self._infos[job.name] = store.info(job.name, job.path, pinned=job.pinned)
        return JobResult(job.job_id)

    def _given_up(self, job: UnloadAdapter) -> AdapterBusyError:
        own = self._slots.reopen(job.name)
        return AdapterBusyError(
            f"LoRA adapter {job.name!r}: {own.requests} requests still use it after "
            f"{job.timeout_s:g} s; it stays loaded: try again, or with a longer timeout_s"
        )
