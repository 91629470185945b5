"""The sizes for which graphs are captured. A step runs in the smallest that fits."""

from __future__ import annotations

MAX_WASTE = 0.125  # most of a bucket's rows that are padding, if a batch is not smaller than one
_TILE_ROWS = (16, 32, 64, 128)  # of skinny_gemm, quantized_gemm and most products of torch
_COARSE, _MULTIPLE = 512, 64  # tokens: behind the first, buckets are multiples of the second


def decode_buckets(most: int) -> tuple[int, ...]:
    """Return sizes from 1 to ``most`` rows, at most an eighth of each being padding.

    Each bucket is the largest that wastes no more for a batch of one row more than the bucket
    before. Kernels multiply 16, 32, 64 or 128 rows at a time, so there are buckets of exactly as
    many: a row of padding more would take nearly twice the time. Up to 256 rows that gives 32.
    """
    sizes = [0]
    while sizes[-1] < most:
        largest = int((sizes[-1] + 1) / (1 - MAX_WASTE) + 1e-9)
        tiles = (rows for rows in _TILE_ROWS if sizes[-1] < rows < largest)
        sizes.append(min(next(tiles, largest), most))
    return tuple(sizes[1:])


def token_buckets(most: int) -> tuple[int, ...]:
    """Return numbers of tokens for steps with prefills: 2^n and 3 · 2^n, above 512 in finer steps.

    Up to a few hundred tokens a step takes about as long as it takes to read the weights, so coarse
    sizes cost little. Above, no more than an eighth of a step is padding.
    """
    coarse = (size for bits in range(3, 10) for size in (2**bits, 3 * 2 ** (bits - 1)))
    sizes = {size for size in coarse if size <= _COARSE}
    size = _COARSE
    while size < most:
        size = max(int(size / (1 - MAX_WASTE)) // _MULTIPLE * _MULTIPLE, size + _MULTIPLE)
        sizes.add(size)
    return (*sorted(size for size in sizes if size < most), most)
