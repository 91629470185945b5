"""What a sampler must do, in numpy and float64, written without a look at the kernel's ways."""

from __future__ import annotations

import numpy as np

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


# ``asked`` below has temperature, top_k, top_p and min_p: see test_sampling.py, which loads this.


def splitmix(state):
    """Vigna's reference generator on numpy's or Python's integers: the output of a state."""
    z = state & MASK if isinstance(state, int) else state
    z = (z ^ (z >> 30 if isinstance(z, int) else z >> np.uint64(30))) * _same(z, 0xBF58476D1CE4E5B9)
    z = z & MASK if isinstance(z, int) else z
    z = (z ^ (z >> 27 if isinstance(z, int) else z >> np.uint64(27))) * _same(z, 0x94D049BB133111EB)
    z = z & MASK if isinstance(z, int) else z
    return z ^ (z >> 31 if isinstance(z, int) else z >> np.uint64(31))


def _same(like, value):
    return value if isinstance(like, int) else np.uint64(value)


def exponentials(seed: int, position: int, vocab: int):
    """The clocks of the tokens 0 .. vocab - 1, float64."""
    row = splitmix((splitmix((seed + GAMMA) & MASK) + position + GAMMA) & MASK)
    tokens = np.arange(vocab, dtype=np.uint64)
    with np.errstate(over="ignore"):
        upper = splitmix(
            np.uint64(row) + (tokens // np.uint64(4) + np.uint64(1)) * np.uint64(GAMMA)
        )
        lower = splitmix(np.uint64(~row & MASK) + (tokens + np.uint64(1)) * np.uint64(GAMMA))
    upper = upper >> (tokens % np.uint64(4) * np.uint64(16)) & np.uint64(0xFFFF)
    bits = upper << np.uint64(36) | lower >> np.uint64(28)
    return -np.log1p(-((bits.astype(np.float64) + 0.5) * 2.0**-52))


def kept(logits, asked):
    """The tokens that may be drawn, their weights, and how near the closest decision was."""
    x = logits.astype(np.float64)
    weights = np.exp((x - x.max()) / asked.temperature)
    mask, near = np.isfinite(x), np.inf
    if 0 < asked.top_k < len(x):
        mask &= x >= np.sort(x)[-asked.top_k]
    if asked.top_p < 1:
        _, inverse = np.unique(-x, return_inverse=True)
        mass = np.bincount(inverse, weights=np.where(mask, weights, 0.0))
        above = (np.cumsum(mass) - mass)[inverse] / mass.sum()
        inside = mask & (x < x.max())
        near = np.abs(above[inside] - asked.top_p).min(initial=np.inf)
        mask &= (above < asked.top_p) | (x == x.max())
    if asked.min_p > 0:
        near = min(near, np.abs(weights[np.isfinite(x)] / asked.min_p - 1).min(initial=np.inf))
        mask &= (weights >= asked.min_p) | (x == x.max())
    return mask, weights, near


def draw(logits, asked, seed: int, position: int):
    """The token of a row, and how near the second was, relative to the first."""
    mask, weights, _ = kept(logits, asked)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        times = np.where(mask, exponentials(seed, position, len(weights)) / weights, np.inf)
    first = int(times.argmin())
    rest = np.delete(times, first)
    gap = rest.min(initial=np.inf) / times[first] - 1 if len(rest) else np.inf
    return first, gap
