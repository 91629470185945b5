"""The sampler in numpy and float64, independent of the kernel's algorithm."""

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
    """The exponential variates of the tokens 0 .. vocab - 1, float64."""
    row = splitmix((splitmix((seed + GAMMA) & MASK) + position + GAMMA) & MASK)
    tokens = np.arange(vocab, dtype=np.uint64)
    with np.errstate(over="ignore"):
        own = splitmix(np.uint64(~row & MASK) + (tokens + np.uint64(1)) * np.uint64(GAMMA))
    low = np.zeros(vocab, dtype=bool)
    low[[token for token in low_tokens(row, vocab) if token < vocab]] = True
    above = ((own >> np.uint64(12)) * np.uint64(255) >> np.uint64(8)) + np.uint64(2**44)
    bits = np.where(low, own >> np.uint64(20), above)
    return -np.log1p(-((bits.astype(np.float64) + 0.5) * 2.0**-52))


def low_tokens(row, vocab):
    """The tokens with a random number below 2^-8.

    One output of the generator gives the first of 32 tokens; bytes of others give the rest.
    """
    edges = [2**32]  # limits of an output if the first 0, 1 ... tokens are not low: 255/256 each
    while len(edges) <= 32:
        edges.append(edges[-1] - edges[-1] // 256)
    tokens = []
    for group in range(-(-vocab // 32)):
        number = splitmix((row + (group + 1) * GAMMA) & MASK) >> 32
        first = sum(number < edge for edge in edges[1:])
        if first == 32:
            continue
        tokens.append(32 * group + first)
        for token in range(tokens[-1] + 1, 32 * group + 32):
            output = splitmix((row + (2**32 + token // 8 + 1) * GAMMA) & MASK)
            if output.to_bytes(8, "little")[token % 8] == 0:
                tokens.append(token)
    return tokens


def kept(logits, asked):
    """The mask of tokens that may be drawn, weights, and the margin of the closest decision."""
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
    """The token of a row, and the relative gap between the first and the second arrival."""
    mask, weights, _ = kept(logits, asked)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        times = np.where(mask, exponentials(seed, position, len(weights)) / weights, np.inf)
    first = int(times.argmin())
    rest = np.delete(times, first)
    gap = rest.min(initial=np.inf) / times[first] - 1 if len(rest) else np.inf
    return first, gap
