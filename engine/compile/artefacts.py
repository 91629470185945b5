"""Saved programs and compiled pieces: in the cache on disk, under its rules of ownership.

An artefact that is damaged, of another key, or that another user could have written is a miss, and
is built again: compiled pieces are code, and this process would run them.
"""

from __future__ import annotations

from collections.abc import Callable

from kiln.cache.disk.lock import builder_lock, lock_folder
from kiln.cache.disk.root import open_piece_store
from kiln.cache.env import Env
from kiln.engine.errors import SealedCacheError
from kiln.jit_kernels.compile.ingredients import Ingredients, key_of

_PATIENCE = 600.0  # seconds to wait while another process builds the same


class Artefacts:
    """The artefacts that the environment's kernel cache holds for one target.

    ``built`` counts those that were not there.
    """

    def __init__(self, env: Env, target: str) -> None:
        self.built = 0
        self._store = open_piece_store(env)
        self._target = target
        self._locks = lock_folder(env) if env.kernel_cache == "rw" else None

    def get(self, name: str, ingredients: Ingredients, build: Callable[[], bytes]) -> bytes:
        """Return the artefact of some ingredients: from disk, else from ``build``, and keep it.

        ``name`` is for messages. Raises SealedCacheError if the cache is sealed and lacks it, and
        what ``build`` raises.
        """
        key = key_of(ingredients)
        found = self._store.get(self._target, key)
        if found is not None:
            return found.payload
        if self._store.mode == "sealed":
            raise SealedCacheError(
                f"the {name} for {self._target}, key {key}, is not in the sealed cache "
                f"({self._store.root}): run `kiln warmup --model` there, or set KILN_COMPILE=off"
            )
        locks = None if self._store.root is None else self._locks
        with builder_lock(locks, key, _PATIENCE):
            found = self._store.get(self._target, key)  # another process may have built it
            if found is not None:
                return found.payload
            payload = build()
            self.built += 1
            header = {"kernel": name, "ingredients": [list(pair) for pair in ingredients]}
            self._store.put(self._target, key, payload, header)
            return payload
