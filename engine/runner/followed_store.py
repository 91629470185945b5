"""The LoRA adapters of a rank that follows rank 0: it does what rank 0's store did, in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kiln.engine.errors import AdapterError, KilnError
from kiln.engine.lora.packing import PackedAdapter
from kiln.engine.lora.store import RankStore

logger = logging.getLogger(__name__)


class FollowedStore:
    """A store, the adapters that were read but not kept yet, and the copies that have ended.

    ``reply`` tells rank 0 why an adapter could not be read, or None.
    """

    def __init__(self, store: RankStore, reply: Callable[[str | None], None]) -> None:
        self._store, self._reply = store, reply
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-lora-load")
        self._read: dict[str, Future[PackedAdapter | None]] = {}
        self._copied: dict[str, AdapterError | None] = {}

    def calls(self) -> tuple[Callable[..., None], ...]:
        """Return what rank 0 may call."""
        own = self._store
        return (self.read, self.add, self.drop, self.begin, self.place, own.forget, own.clear)

    def read(self, name: str, path: str) -> None:
        """Begin to read an adapter while steps run."""
        self._read[name] = self._thread.submit(self._try_read, name, path)

    def add(self, name: str) -> None:
        """Keep the adapter that was read."""
        packed = self._read.pop(name).result()
        assert packed is not None, "rank 0 was told that it could not be read"
        self._store.add(packed)

    def drop(self, name: str) -> None:
        """Do not keep the adapter that was read, if it could be read."""
        self._read.pop(name)

    def begin(self, name: str, slot: int, start: int) -> None:
        """Begin to copy an adapter to the device."""
        self._copied.pop(name, None)
        self._store.begin(name, slot, start)

    def place(self, name: str) -> None:
        """Publish an adapter that rank 0 has copied; wait until its copy has ended here too.

        Copies end in the order of their beginning. Those that failed on rank 0 it does not place.
        """
        while name not in self._copied:
            ended = self._store.copied(wait=True)
            assert ended, f"{name} is placed, and no copy of it has begun"
            self._copied.update(ended)
        error = self._copied.pop(name)
        if error is not None:  # rank 0 has this adapter, so this rank cannot go on
            raise error

    def _try_read(self, name: str, path: str) -> PackedAdapter | None:
        """Read an adapter, and tell rank 0 how it went."""
        try:
            packed = self._store.read(name, path)
        except Exception as error:
            if not isinstance(error, KilnError):
                logger.exception("reading LoRA adapter %r failed", name)
            self._reply(str(error) or repr(error))
            return None
        self._reply(None)
        return packed
