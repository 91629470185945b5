"""Loading and unloading LoRA adapters while requests run.

A load reads and checks its files in a thread; the adapter is published between two steps. An unload
refuses new requests at once, and ends when those that it has are done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from kiln.engine.config import LoRAConfig, LoRAModule
from kiln.engine.errors import AdapterBusyError, AdapterError, AdapterPathError, KilnError
from kiln.engine.lora.loaded_adapter import AdapterStore
from kiln.engine.lora.slots import AdapterSlots
from kiln.engine.requests.adapter_job import AdapterInfo, LoadAdapter, UnloadAdapter

logger = logging.getLogger(__name__)


class JobResult(NamedTuple):
    """How a job ended."""

    job_id: str
    error: KilnError | None = None


class AdapterJobs:
    """The adapters of an engine, and the jobs that add and remove some; not thread-safe.

    The store of ``slots`` has read those of the config already.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        config: LoRAConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slots, self._store, self._root = slots, slots.store, config.root
        self._clock = clock
        self._infos: dict[str, AdapterInfo] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-lora-load")
        self._loads: dict[str, tuple[LoadAdapter, Future[Any]]] = {}  # by name
        self._unloads: list[tuple[UnloadAdapter, float]] = []  # with their deadlines
        for module in config.modules:
            assert self._store is not None, "adapters need a store"
            self._publish(self._store, module.name, module.path)
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
        if self._store is None or self._root is None:
            raise AdapterPathError(
                "adapters are loaded and unloaded while serving only with --lora-root, the folder "
                "that holds them: start the server with it"
            )
        if isinstance(job, UnloadAdapter):
            self._slots.get(job.name).leaving = True
            self._unloads.append((job, self._clock() + job.timeout_s))
            return
        LoRAModule(job.name, job.path)  # raises ConfigError
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
        loaded = [job for job, future in self._loads.values() if future.done()]
        ended = [self._end_load(self._store, job) for job in loaded]
        now, still = self._clock(), []
        for job, deadline in self._unloads:
            if self._slots.remove(job.name):
                self._store.forget(job.name)
                del self._infos[job.name]
                ended.append(JobResult(job.job_id))
            elif now >= deadline:
                ended.append(JobResult(job.job_id, self._given_up(job)))
            else:
                still.append((job, deadline))
        self._unloads = still
        return ended

    def _end_load(self, store: AdapterStore, job: LoadAdapter) -> JobResult:
        _, future = self._loads.pop(job.name)
        try:
            store.add(future.result())
            try:
                self._publish(store, job.name, job.path, pinned=job.pinned)
            except KilnError:
                store.forget(job.name)
                raise
        except KilnError as error:
            return JobResult(job.job_id, error)
        except Exception as error:  # a fault of one load must not end the engine
            logger.exception("loading LoRA adapter %r failed", job.name)
            return JobResult(job.job_id, AdapterError(f"LoRA adapter {job.name!r}: {error!r}"))
        return JobResult(job.job_id)

    def _publish(self, store: AdapterStore, name: str, path: str, *, pinned: bool = False) -> None:
        self._slots.add(name, store.sizes[name], pinned)
        self._infos[name] = store.info(name, path, pinned=pinned)

    def _given_up(self, job: UnloadAdapter) -> AdapterBusyError:
        own = next(one for one in self._slots.loaded if one.name == job.name)
        own.leaving = False
        return AdapterBusyError(
            f"LoRA adapter {job.name!r}: {own.requests} requests still use it after "
            f"{job.timeout_s:g} s; it stays loaded: try again, or with a longer timeout_s"
        )
