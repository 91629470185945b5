"""What the host tier asks of the memory that its copies go to. It needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class HostBlocks(Protocol):
    """Host memory in slots, each as large as a block of the KV pool, and copies in the background.

    Copies run one after the other, in the order of their beginning. None reads or writes a block
    before the steps that were launched ahead of it have ended.
    """

    @property
    def num_slots(self) -> int:
        """How many blocks the host memory holds."""

    def store(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy blocks to slots, which hold anything until the copy has ended."""

    def load(self, blocks: list[int], slots: list[int]) -> None:
        """Begin to copy slots to blocks, which no step may use until the copy has ended."""

    def ended(self, *, wait: bool = False) -> Sequence[Exception | None]:
        """Return what each copy raised that has ended, each once, in the order of their beginning.

        With ``wait``, first wait for the oldest copy, if there is any.
        """

    def drain(self) -> None:
        """Wait until all copies have ended, and forget those that ``ended`` has not returned."""
