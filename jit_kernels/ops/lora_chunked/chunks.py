"""The chunk table: a step's tokens sorted by adapter, in chunks of one adapter each."""

from __future__ import annotations

SMALL, LARGE = 16, 64  # tokens of a chunk: CHUNK of the kernels
_MOST_ROWS = 256  # steps of more tokens have prompts, whose tokens have one adapter


def chunk_size(tokens: int, itemsize: int) -> int:
    """Return the tokens of a chunk; the bits of none of them depend on it.

    ``itemsize``: bytes of an element of the weights; there are no large chunks in float32.
    """
    return LARGE if tokens > _MOST_ROWS and itemsize == 2 else SMALL


def num_chunks(tokens: int, num_slots: int, chunk: int) -> int:
    """Return how many chunks so many tokens of any adapters can fill, at least 1."""
    used = min(tokens, num_slots)  # each slot in use has at most chunk - 1 places of padding
    return max(1, (tokens + used * (chunk - 1)) // chunk)
