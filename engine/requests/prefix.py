"""What prefix caching keeps of a request: where its KV blocks stand in the index."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

# What requests must have in common to share blocks: the number of the load of their LoRA adapter (0
# for the base model), the cache salt, and the row where their part of the rotary table begins.
Root = tuple[int, str | None, int]
Key = tuple[int | Root, bytes]  # a block: the uid of its parent, or a root, and its tokens' bytes


class Tail(NamedTuple):
    """The end of an indexed sequence of ``length`` blocks: its last place, -1 at a root."""

    length: int
    block: int
    uid: int | Root


@dataclass(slots=True)
class PrefixState:
    """Only ``KVManager`` changes it.

    ``root`` is what the keys and values depend on besides the tokens. While the request runs and
    its blocks can be indexed, ``tail`` is the end of those that are; ``index_at`` is how many
    computed tokens complete the next one, which is ``next_key`` if its tokens are known and no
    other request computes it. ``leader`` is that of a running request which computes a prefix of
    this waiting one, as many blocks as the number says. ``num_loads``: how often blocks came from
    the host while it waited.
    """

    root: Root = (0, None, 0)
    tail: Tail | None = None
    index_at: int = sys.maxsize
    next_key: Key | None = None
    leader: tuple[PrefixState, int] | None = None
    num_loads: int = 0

    @property
    def awaits_leader(self) -> bool:
        """Whether the leader still computes what this request needs."""
        if self.leader is None:
            return False
        ahead, num_blocks = self.leader
        tail = ahead.tail
        leads = ahead.next_key is not None and tail is not None and tail.length < num_blocks
        if not leads:
            self.leader = None
        return leads
