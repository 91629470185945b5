"""Give a restarted engine the LoRA adapters that the one before had."""

from __future__ import annotations

import logging

from kiln.engine.errors import EngineDeadError, KilnError
from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.requests.adapter_job import AdapterInfo

logger = logging.getLogger(__name__)


class RestoredAdapters:
    """The adapters of an engine that has ended, for the next one.

    An engine loads the adapters of its configuration by itself. Those that were loaded while
    serving are loaded again, and those that were unloaded are unloaded again.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, AdapterInfo] = {}
        self._num_loaded = 0

    @property
    def summary(self) -> str:
        """What the last ``restore`` has loaded, for the log; empty if that is nothing."""
        count = self._num_loaded
        return f"; {count} LoRA adapter{'s' if count > 1 else ''} loaded again" if count else ""

    def remember(self, ended: AdapterCalls) -> None:
        """Keep what an engine that has ended had."""
        self._wanted = dict(ended.adapters)

    async def restore(self, calls: AdapterCalls) -> None:
        """Load what the next engine lacks, and unload what it should not have.

        An adapter that fails is logged and left out, also from later restarts. Raises
        EngineDeadError if the engine ends meanwhile: the adapter may be why.
        """
        self._num_loaded = 0
        for name, own in list(calls.adapters.items()):
            wanted = self._wanted.get(name)
            if wanted is None or (wanted.path, wanted.pinned) != (own.path, own.pinned):
                await calls.unload(name, timeout_s=0.0)
        for name, info in list(self._wanted.items()):
            if name in calls.adapters:
                continue
            del self._wanted[name]
            try:
                await calls.load(name, info.path, pinned=info.pinned)
            except KilnError as error:
                logger.error("LoRA adapter %r is not loaded again: %s", name, error)
                if isinstance(error, EngineDeadError):
                    raise
            else:
                self._wanted[name] = info
                self._num_loaded += 1
