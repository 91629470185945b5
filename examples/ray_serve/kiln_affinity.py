"""Which replica should answer: the routing rules, without Ray.

A prompt is cut into pieces at the ends of its messages and every 256 characters. The digest of a
piece covers the adapter and all earlier pieces, so that two prompts share a digest only if they
have the same beginning and the same adapter.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeVar

PIECE_CHARS = 256
MAX_PIECES = 512  # of a prompt; what follows has no effect on routing
MAX_DIGESTS = 65_536  # remembered; the ones used least recently are forgotten

Replica = TypeVar("Replica", bound=Hashable)


def read_prompt(body: bytes, served_names: Collection[str]) -> tuple[str, list[str]]:
    """Return a request's adapter ("" for the base model) and its prompt in pieces.

    What cannot be read has no adapter and no pieces: Kiln answers it with its own error.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return "", []
    if not isinstance(fields, dict):
        return "", []
    model = fields.get("model")
    adapter = model if isinstance(model, str) and model not in served_names else ""
    for base in served_names:
        adapter = adapter.removeprefix(f"{base}:")
    prompt = fields.get("messages", fields.get("prompt"))
    parts: list[Any] = prompt if isinstance(prompt, list) and "messages" in fields else [prompt]
    pieces: list[str] = []
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part, sort_keys=True)
        pieces += (text[at : at + PIECE_CHARS] for at in range(0, len(text), PIECE_CHARS))
        if len(pieces) >= MAX_PIECES:
            break
    return "" if adapter in served_names else adapter, pieces[:MAX_PIECES]


def digests(adapter: str, pieces: Collection[str]) -> tuple[bytes, ...]:
    """Return the digest of the adapter, if there is one, then one for each piece."""
    state = hashlib.blake2b(adapter.encode("utf-8", "surrogatepass"), digest_size=16)
    found = [state.digest()] if adapter else []
    for piece in pieces:
        data = piece.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(4, "big") + data)
        found.append(state.digest())
    return tuple(found)


class PrefixMemory:
    """Remembers which replicas answered prompts with which beginnings."""

    def __init__(self, max_digests: int = MAX_DIGESTS) -> None:
        self._max_digests = max_digests
        self._replicas: OrderedDict[bytes, set[Hashable]] = OrderedDict()

    def remember(self, chain: Collection[bytes], replica: Hashable) -> None:
        """Note that a replica answers a prompt, given by its ``digests``."""
        for digest in chain:
            self._replicas.setdefault(digest, set()).add(replica)
            self._replicas.move_to_end(digest)
        while len(self._replicas) > self._max_digests:
            self._replicas.popitem(last=False)

    def forget_all_but(self, alive: Collection[Hashable]) -> None:
        """Forget replicas that are gone."""
        kept = set(alive)
        for digest, replicas in list(self._replicas.items()):
            replicas &= kept
            if not replicas:
                del self._replicas[digest]

    def matches(self, chain: Collection[bytes]) -> dict[Hashable, int]:
        """Return for each replica the pieces, the adapter's included, that it saw of a prompt."""
        found: dict[Hashable, int] = {}
        for depth, digest in enumerate(chain, 1):
            replicas = self._replicas.get(digest)
            if not replicas:
                break
            found.update(dict.fromkeys(replicas, depth))
        return found


def rank(
    loads: Mapping[Replica, int],
    tiers: Mapping[Replica, int],
    matches: Mapping[Any, int],
    spill_above: int,
    draw: Callable[[], float] = random.random,
) -> list[list[Replica]]:
    """Return the replicas in groups, the best one alone and first.

    ``loads``: requests that each replica works on. ``tiers``: 0 has the adapter, or none is asked
    for; 1 has the fewest adapters; 2 the others. ``matches``: pieces of the prompt that a replica
    saw. A replica with more than ``spill_above`` requests more than the least loaded one comes
    last, whatever it has.
    """
    if not loads:
        return []
    limit = min(loads.values()) + spill_above
    near = sorted(
        (one for one in loads if loads[one] <= limit),
        key=lambda one: (tiers[one], -matches.get(one, 0), loads[one], draw()),
    )
    far = [one for one in loads if loads[one] > limit]
    return [group for group in (near[:1], near[1:], far) if group]
