"""The order of a projection's outputs where rotary pairs are neighbours in the checkpoint.

Kiln's kernels rotate dimension i of a head together with i + dim / 2. Some families rotate 2i
together with 2i + 1. If the even ones of each head come first and the odd ones behind them, in
queries and keys, the kernels rotate the same pairs; the products of queries and keys do not change.
"""

from __future__ import annotations

from functools import cache

Order = tuple[int, ...]
"""Which output of the checkpoint comes first, which second, and so on; empty: as stored."""


@cache
def halves_of_pairs(num_heads: int, head_dim: int, dim: int, others: int = 0) -> Order:
    """Return the order for heads of which the first ``dim`` dimensions are rotated.

    ``others``: outputs behind those of all heads, which stay, such as values.
    """
    head = [*range(0, dim, 2), *range(1, dim, 2), *range(dim, head_dim)]
    heads = (index * head_dim + one for index in range(num_heads) for one in head)
    return (*heads, *range(num_heads * head_dim, num_heads * head_dim + others))
