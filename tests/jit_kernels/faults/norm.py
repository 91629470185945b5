"""Faults planted in the norm kernels; see test_faults.py."""

from functools import partial

from norm_rounding import rounds_elsewhere

_ROWS, _RMS = "kiln/rows/rows.cuh", "kiln/rows/rms.cuh"


def _at(rows, d, gap=0, offset=0):
    return [{"rows": rows, "d": d, "gap": gap, "offset": offset}]


# Teams of 16, 32, 128 and 384 threads for bf16, those of 128 with a chunk each; held rows but for
# _UNALIGNED, which has vectors that are not, and _ODD, whose width no vectors fill.
_SMALL, _WARP, _NARROW, _WIDE = _at(35, 64), _at(5, 192, 8), _at(2, 896), _at(2, 4104, 8)
_UNALIGNED, _ODD = _at(37, 64, 3), _at(34, 60, 4)


def _rounding(**sizes):
    return partial(rounds_elsewhere, sizes={"rows": 20, **sizes})


FAULTS = [
    {"kernel": "rms_norm", **fault}
    for fault in [
        {
            "name": "dropped barrier before the sums are read",
            "old": "  __syncthreads();\n  return sum_warps(partial, int(blockDim.x) / 32);",
            "new": "  return sum_warps(partial, int(blockDim.x) / 32);",
            "header": _ROWS,
            "sizes": _at(3, 2048),
        },
        {
            "name": "half of each warp left out of the sum",
            "old": "if (blockDim.x > 16) x = add_rn",
            "new": "if (blockDim.x > 32) x = add_rn",
            "header": _ROWS,
            "sizes": _WARP,
        },
        {
            "name": "four warps left out of the sum",
            "old": "if (warps > 4) x =",
            "new": "if (warps > 12) x =",
            "header": _ROWS,
            "sizes": _WIDE,
        },
        {
            "name": "the last warps left out of the sum",
            "old": "int w = 8; w < warps;",
            "new": "int w = 8; w + 4 < warps;",
            "header": _ROWS,
            "sizes": _WIDE,
        },
        {
            "name": "misaligned vectors",
            "old": "return misalignment_of(first) | uint32_t(stride) * sizeof(T);",
            "new": "return misalignment_of(first);",
            "header": _ROWS,
            "sizes": _UNALIGNED,
        },
        {
            "name": "elements of the next thread",
            "old": "if (++i % kSize == 0) i +=",
            "new": "if (++i % kSize == kSize - 1) i +=",
            "header": _ROWS,
            "sizes": _UNALIGNED,
        },
        {
            "name": "vectors past the row",
            "old": " | uint32_t(d) * sizeof(T);",
            "new": ";",
            "header": _ROWS,
            "sizes": _ODD,
        },
        {
            "name": "rows too wide for the registers",
            "old": "uint64_t(d) <= Source::kChunks * team_span<T>()",
            "new": "true",
            "header": _ROWS,
            "sizes": _at(1, 16392),
        },
        {
            "name": "dropped last chunk of the result",
            "old": "if (i < size) part.chunk[v].store(p);",
            "new": "if (i < size - Chunk<T>::kSize) part.chunk[v].store(p);",
            "header": _ROWS,
            "sizes": _WARP,
        },
        {
            "name": "dropped tail of a row that is not aligned",
            "old": "while (i < end) {",
            "new": "while (i < end - 1) {",
            "header": _ROWS,
            "sizes": _ODD,
        },
        {
            "name": "a row past the last",
            "old": "held && mine ? uint32_t(d) : 0;",
            "new": "held ? uint32_t(d) : 0;",
            "header": _ROWS,
            "sizes": _SMALL,
        },
        {
            "name": "the first team of a block for all",
            "old": "blockDim.y + threadIdx.y;",
            "new": "blockDim.y;",
            "header": _ROWS,
            "sizes": _SMALL,
        },
        {
            "name": "elements in the wrong half of a word",
            "old": "pack<T>(x[0], x[1])",
            "new": "pack<T>(x[1], x[0])",
            "header": "kiln/rows/chunk.cuh",
            "sizes": _WARP,
        },
        {
            "name": "no square root",
            "old": "rcp_rn_normal(sqrt_rn_normal(x))",
            "new": "rcp_rn_normal(x)",
            "header": _RMS,
            "sizes": _WARP,
        },
        {
            "name": "no weight",
            "old": "Word<T>::product(Word<T>::packed(y), weight.word[i])",
            "new": "Word<T>::packed(y)",
            "header": _RMS,
            "sizes": _WARP,
        },
        {
            "name": "no weight offset",
            "old": "add_rn(w[k], offset)",
            "new": "w[k]",
            "header": _RMS,
            "sizes": _at(3, 2048, 0, 1),
        },
        {
            "name": "no weight offset in a row that is not aligned",
            "old": "add_rn(to_float(weight[i]), offset)",
            "new": "to_float(weight[i])",
            "header": _RMS,
            "sizes": _at(3, 7, 0, 1),
        },
        {
            "name": "the tail of a row left out of the sum",
            "old": " || i + 1 == size",
            "new": "",
            "header": _RMS,
            "sizes": _at(3, 7),
        },
        {
            "name": "chunks added twice",
            "old": "        of_chunk = 0.0f;\n",
            "new": "",
            "header": _RMS,
            "sizes": _at(2, 4100, 3),
        },
        {
            "name": "second chunks left out of the sum",
            "old": "if (v && row.narrow) continue;",
            "new": "if (v) continue;",
            "header": _RMS,
            "sizes": _at(2, 2048),
        },
        {
            "name": "second chunks not normalised",
            "old": "if (v == 0 || !narrow) y",
            "new": "if (v == 0) y",
            "header": _RMS,
            "sizes": _at(2, 2048),
        },
        {
            "name": "half of a row taken for a narrow one",
            "old": "uint32_t(d) <= team_span<T>();",
            "new": "uint32_t(d) <= 2 * team_span<T>();",
            "header": _ROWS,
            "sizes": _at(2, 2048),
        },
        {
            "name": "no weight in a narrow row",
            "old": "normalise(part.chunk[v], scale, weights.chunk[v])",
            "new": "normalise(part.chunk[v], scale, v ? weights.chunk[v] : part.chunk[v])",
            "header": _RMS,
            "sizes": _NARROW,
        },
        {
            "name": "a product of two roundings in place of one",
            "old": "    if (!once) {\n#pragma",
            "new": "    if (true) {\n#pragma",
            "header": _RMS,
            "scenario": _rounding(d=192, once=1),
        },
        {
            "name": "a product of one rounding in place of two",
            "old": "    if (!once) {\n#pragma",
            "new": "    if (false) {\n#pragma",
            "header": _RMS,
            "scenario": _rounding(d=192),
        },
        {
            "name": "a product of two roundings in a row that is not aligned",
            "old": "    if (!once) {\n      from_float",
            "new": "    if (true) {\n      from_float",
            "header": _RMS,
            "scenario": _rounding(d=191, gap=1, once=1),
        },
        {
            "name": "two roundings with an offset of 0",
            "old": "weight_offset, once != 0,",
            "new": "weight_offset, weight_offset != 0.0f,",
            "scenario": _rounding(d=192, once=1),
        },
        {
            "name": "rows taken as dense",
            "old": "x + index * x_stride",
            "new": "x + index * size",
            "header": _RMS,
            "sizes": _WARP,
        },
    ]
] + [
    {
        "kernel": "fused_add_rms_norm",
        "name": "two roundings with an offset of 0",
        "old": "weight_offset, once != 0,",
        "new": "weight_offset, weight_offset != 0.0f,",
        "scenario": _rounding(d=192, once=1),
    },
    {
        "kernel": "fused_add_rms_norm",
        "name": "sum not stored",
        "old": "if (ADD) store_part(row.part, residual + index * residual_stride, size);",
        "new": "",
        "header": _RMS,
        "sizes": _WARP,
    },
    {
        "kernel": "fused_add_rms_norm",
        "name": "sum of an unaligned row not stored",
        "old": "if (ADD) sums[i] = s;",
        "new": "",
        "header": _RMS,
        "sizes": _UNALIGNED,
    },
    {
        "kernel": "fused_add_rms_norm",
        "name": "norm of x alone",
        "old": "return {ADD ? sums : in, weight,",
        "new": "return {in, weight,",
        "header": _RMS,
        "sizes": _UNALIGNED,
    },
]  # fmt: skip
