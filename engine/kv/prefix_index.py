"""Finds the KV blocks whose contents begin with given tokens: the index of prefix caching.

A full block is known by its parent, the block ahead of it, and by its own tokens:

    key   (uid of the parent, the tokens' bytes)   compared whole: nothing is decided by a hash
    uid   a number that is given once for each block that is added; it stands for the contents of
          this block and of all that lead to it

The first block of a sequence has a root as its parent: what else its keys and values depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kiln.engine.requests.prefix import Key, Root, Tail


class PrefixIndex:
    """The contents of the indexed blocks of a pool of ``num_blocks``."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks: dict[Key, int] = {}
        self._keys: list[Key | None] = [None] * num_blocks  # by block, as are the uids
        self._uids = [0] * num_blocks  # 0: not indexed
        self._last_uid = 0

    def __len__(self) -> int:
        """Return how many blocks are indexed."""
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        """Return whether a block is indexed."""
        return self._uids[block] != 0

    def find(self, root: Root, pieces: Iterable[bytes]) -> tuple[list[int], Tail]:
        """Return the longest run of indexed blocks that have these tokens, and its end.

        ``pieces`` has the tokens of each block, in order.
        """
        known, uids = self._blocks, self._uids
        found: list[int] = []
        uid: int | Root = root
        for tokens in pieces:
            block = known.get((uid, tokens))
            if block is None:
                break
            found.append(block)
            uid = uids[block]
        return found, Tail(len(found), found[-1] if found else -1, uid)

    def add(self, tail: Tail, pieces: Sequence[bytes], blocks: Iterable[int]) -> Tail | None:
        """Index blocks with these tokens behind a tail; return the new tail.

        Where another block with the same contents is indexed, it stays the one, and the new one is
        not indexed. None: the tail itself is no longer indexed, so nothing could find the blocks.
        """
        known, uids = self._blocks, self._uids
        _, last, uid = tail
        if last >= 0 and uids[last] != uid:
            return None
        for tokens, block in zip(pieces, blocks, strict=True):
            key = (uid, tokens)
            last = known.setdefault(key, block)
            if last == block:
                self._last_uid += 1
                self._keys[block], uids[block] = key, self._last_uid
            uid = uids[last]
        return Tail(tail.length + len(pieces), last, uid)

    def forget(self, block: int) -> None:
        """Remove an indexed block, whose contents are about to change."""
        key = self._keys[block]
        assert key is not None, f"block {block} is not indexed"
        del self._blocks[key]
        self._keys[block], self._uids[block] = None, 0

    def clear(self) -> None:
        """Forget all blocks. No uid is given again, so no older tail is mistaken for a new one."""
        self._blocks.clear()
        self._keys, self._uids = [None] * len(self._keys), [0] * len(self._uids)
