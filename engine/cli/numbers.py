"""Numbers on the command line; argparse shows these errors with the flag's name."""

from __future__ import annotations

from argparse import ArgumentTypeError


def count(text: str, least: int = 1) -> int:
    """Return a whole number of ``least`` or more. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ArgumentTypeError(f"{text!r}: must be a whole number of {least} or more")
    return int(text)


def counts(text: str, least: int = 1) -> tuple[int, ...]:
    """Return the numbers of a list such as "1,16,64", without duplicates. Raises the same."""
    return tuple(dict.fromkeys(count(part.strip(), least) for part in text.split(",")))


def batches(text: str) -> tuple[tuple[int, int], ...]:
    """Return count and length of each part of a list such as "64x256,8x8000". Raises the same."""
    parts = [part.partition("x") for part in text.split(",")]
    return tuple(
        dict.fromkeys((count(many.strip()), count(long.strip())) for many, _, long in parts)
    )


def count_range(text: str) -> tuple[int, int]:
    """Return the bounds of a range such as "100-1024", or of one number. Raises the same."""
    low, _, high = text.partition("-")
    bounds = count(low), count(high or low)
    if bounds[0] > bounds[1]:
        raise ArgumentTypeError(f"{text!r}: the first number must not exceed the second")
    return bounds
