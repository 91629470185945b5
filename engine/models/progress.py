"""The texts of what a model's loading reports: (stage, done, total)."""

from __future__ import annotations

_IN_BYTES = ("weights",)  # stages that count these; the others count what they do


def announcement(stage: str, total: int) -> str:
    """Return a stage's name, and how much there is to do if that is bytes."""
    return f"{stage}, {total / 1e9:.2f} GB" if stage in _IN_BYTES and total else stage


def amount(stage: str, done: int, total: int, seconds: float) -> str:
    """Return how much of a stage is done after ``seconds``; of bytes also how many in a second."""
    if stage not in _IN_BYTES:
        return f"{done}/{total or '?'}"
    speed = f", {done / seconds / 1e9:.1f} GB/s" if seconds > 0 and done else ""
    return f"{done / 1e9:.2f}/{total / 1e9:.2f} GB{speed}"
