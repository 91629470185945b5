"""Finds the KV blocks whose contents begin with given tokens: the index of prefix caching.

A full block is known by its parent, the block ahead of it, and by its own tokens:

    key   (uid of the parent, the tokens' bytes)   compared whole: nothing is decided by a hash
    uid   a number that is given once for each block that is added; it stands for the contents of
          this block and of all that lead to it

The first block of a sequence has a root as its parent: what else its keys and values depend on.

With a host tier the contents of a block can be in host memory, too or instead:

    place   a block of the pool, below ``num_blocks``; or a host slot, from there on

Both places of the same contents have the same uid, so what follows a block is found behind its copy
on the host as well. A look-up gives the block if there is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kiln.engine.requests.prefix import Key, Root, Tail


class PrefixIndex:
    """The contents of the indexed blocks of a pool of ``num_blocks``, and of host slots."""

    def __init__(self, num_blocks: int, num_slots: int = 0) -> None:
        self.num_blocks = num_blocks
        self._places: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * (num_blocks + num_slots)  # by place, as are all
        self._uids = [0] * (num_blocks + num_slots)  # 0: not indexed
        self._twins = [-1] * (num_blocks + num_slots)  # the other place of the same contents
        self._last_uid = 0

    def __len__(self) -> int:
        """Return how many contents are known."""
        return len(self._places)

    def __contains__(self, block: int) -> bool:
        """Return whether a block is indexed."""
        return self._uids[block] != 0

    def find(self, root: Root, pieces: Iterable[bytes]) -> tuple[list[int], Tail]:
        """Return the longest run of places that have these tokens, and its end.

        ``pieces`` has the tokens of each block, in order.
        """
        known, uids = self._places, self._uids
        found: list[int] = []
        uid: int | Root = root
        for tokens in pieces:
            block = known.get((uid, tokens))
            if block is None:
                break
            found.append(block)
            uid = uids[block]
        return found, Tail(len(found), found[-1] if found else -1, uid)

    def tail(self, root: Root, places: Sequence[int]) -> Tail:
        """Return the end of a run that ``find`` has found, or of its beginning."""
        if not places:
            return Tail(0, -1, root)
        return Tail(len(places), places[-1], self._uids[places[-1]])

    def add(self, tail: Tail, pieces: Sequence[bytes], blocks: Iterable[int]) -> Tail | None:
        """Index blocks with these tokens behind a tail; return the new tail.

        Where another block with the same contents is indexed, it stays the one, and the new one is
        not indexed. None: the tail itself is no longer indexed, so nothing could find the blocks.
        """
        known, uids = self._places, self._uids
        _, last, uid = tail
        if last >= 0 and uids[last] != uid:
            return None
        for tokens, block in zip(pieces, blocks, strict=True):
            key = (uid, tokens)
            last = known.setdefault(key, block)
            if last == block:
                self._last_uid += 1
                self._keys[block], uids[block] = key, self._last_uid
            elif last >= self.num_blocks:  # it was on the host alone
                self.pair(last, block)
                last = block
            uid = uids[last]
        return Tail(tail.length + len(pieces), last, uid)

    def uid(self, place: int) -> int:
        """Return the uid of the contents of a place; 0: they are not known."""
        return self._uids[place]

    def twin(self, place: int) -> int:
        """Return the other place of the same contents, -1 if there is none."""
        return self._twins[place]

    def pair(self, place: int, other: int) -> None:
        """Note that a place without known contents has those of another: block and host slot."""
        key = self._keys[place]
        assert key is not None, f"place {place} is not indexed"
        assert not self._uids[other], f"place {other} is indexed"
        assert self._twins[place] < 0, f"the contents of {place} are in two places already"
        self._keys[other], self._uids[other] = key, self._uids[place]
        self._twins[place], self._twins[other] = other, place
        self._places[key] = min(place, other)

    def forget(self, place: int) -> None:
        """Remove an indexed place, whose contents are about to change."""
        key, twin = self._keys[place], self._twins[place]
        assert key is not None, f"place {place} is not indexed"
        self._keys[place], self._uids[place], self._twins[place] = None, 0, -1
        if twin < 0:
            del self._places[key]
        else:
            self._places[key], self._twins[twin] = twin, -1

    def clear(self) -> None:
        """Forget all blocks. No uid is given again, so no older tail is mistaken for a new one."""
        self._places.clear()
        size = len(self._keys)
        self._keys, self._uids, self._twins = [None] * size, [0] * size, [-1] * size
