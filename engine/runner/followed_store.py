"""The LoRA adapters of a rank that follows rank 0: it does what rank 0's store did, in order."""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor

from kiln.engine.distributed.channel import Kind
from kiln.engine.distributed.inbox import Inbox
from kiln.engine.errors import KilnError
from kiln.engine.lora.packing import PackedAdapter
from kiln.engine.lora.store import AdapterStore

logger = logging.getLogger(__name__)


class FollowedStore:
    """A store, and the adapters that were read but not kept yet."""

    def __init__(self, store: AdapterStore, inbox: Inbox) -> None:
        self._store, self._inbox = store, inbox
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kiln-lora-load")
        self._read: dict[str, Future[PackedAdapter | None]] = {}

    def do(self, kind: Kind, content: bytes) -> None:
        """Do what a message says. Raises ValueError if it is not about adapters."""
        told = json.loads(content)
        match kind:
            case Kind.READ:
                name, path = told["name"], told["path"]
                self._read[name] = self._thread.submit(self._try_read, name, path)
            case Kind.ADD:
                packed = self._read.pop(told).result()
                assert packed is not None, "rank 0 was told that it could not be read"
                self._store.add(packed)
            case Kind.DROP:
                self._read.pop(told)
            case Kind.FORGET:
                self._store.forget(told)
            case Kind.BEGIN:
                self._store.begin(*told)
            case Kind.PLACE:
                # Copies end in the order of their beginning.
                for _, error in self._store.copied(wait=True):
                    if error is not None:  # rank 0 has this adapter, so this rank cannot go on
                        raise error
            case Kind.CLEAR:
                self._store.clear(told)
            case _:
                raise ValueError(f"a message of kind {kind.name} to a follower")

    def _try_read(self, name: str, path: str) -> PackedAdapter | None:
        """Read an adapter while steps run, and tell rank 0 how it went."""
        try:
            packed = self._store.read(name, path)
        except Exception as error:
            if not isinstance(error, KilnError):
                logger.exception("reading LoRA adapter %r failed", name)
            self._inbox.reply(str(error) or repr(error))
            return None
        self._inbox.reply(None)
        return packed
