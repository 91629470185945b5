"""Numbers on the command line; argparse shows these errors with the flag's name."""

from __future__ import annotations

import math
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


def above_zero(text: str) -> float:
    """Return a number above 0, or infinity for "inf". Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ArgumentTypeError(f"{text[:80]!r}: must be a number above 0, or inf")
    return value


def rates(text: str) -> tuple[float, ...]:
    """Return the numbers of a list such as "1,2.5,inf", without duplicates. Raises the same."""
    return tuple(dict.fromkeys(above_zero(part.strip()) for part in text.split(",")))


def percentiles(text: str) -> tuple[float, ...]:
    """Return the percentiles of a list such as "50,99.9". Raises ArgumentTypeError."""
    found = rates(text)
    if max(found) > 100:
        raise ArgumentTypeError(f"{text[:80]!r}: percentiles are between 0 and 100")
    return found


def share(text: str) -> float:
    """Return a number of at least 0 and below 1. Raises ArgumentTypeError."""
    value = 0.0 if text == "0" else above_zero(text)
    if value >= 1:
        raise ArgumentTypeError(f"{text[:80]!r}: must be at least 0 and below 1")
    return value


def goals(text: str) -> dict[str, float]:
    """Return milliseconds by metric, from "ttft:500,tpot:50". Raises ArgumentTypeError."""
    found = {}
    for part in text.replace(" ", ",").split(","):
        name, colon, value = part.partition(":")
        if not colon or name not in ("ttft", "tpot", "e2el"):
            raise ArgumentTypeError(f"{part[:80]!r}: want ttft:MS, tpot:MS or e2el:MS")
        found[name] = above_zero(value)
    return found
