"""Faults planted in the chunked LoRA kernels; see test_faults.py."""

from kiln.jit_kernels.ops.lora_chunked.cases import EXPAND_SIZES, SHRINK_SIZES

_CHUNK = "lora_chunked/chunk.cuh"
_LARGE = {"scalar_t": "kiln::bf16", "chunk": "64"}
_HALF = {"scalar_t": "kiln::fp16", "chunk": "16"}
_FLOAT = {"scalar_t": "float"}
# Of shrink: one part; three parts; a width that no vectors fill; strided rows; several warps;
# several chunks of an adapter.
_ONE_PART, _PARTS, _ODD, _STRIDED, _LONG, _FULL = ([SHRINK_SIZES[i]] for i in (3, 4, 5, 6, 7, 8))
# Of expand, in that order, then tiles that vectors fill, a grid with a spare block, full chunks,
# rows that are not aligned behind the first, a large h, and aligned rows of parts of odd sizes.
_OUT_ONE, _OUT_PARTS, _OUT_ODD, _OUT_TILES, _OUT_SPARE, _OUT_FULL, _OUT_ROWS, _OUT_LIFT = (
    [EXPAND_SIZES[i]] for i in (3, 4, 5, 6, 7, 8, 2, 10)
)
_OUT_UNFILLED, _OUT_UNEVEN = ([EXPAND_SIZES[i]] for i in (12, 13))  # ranks that no 16 divides

FAULTS = [
    {"kernel": "lora_chunked_shrink", **fault}
    for fault in [
        {
            "name": "the first slot without its tokens",
            "old": "if (slot < 0) return;",
            "new": "if (slot <= 0) return;",
            "sizes": _PARTS,
        },
        {
            "name": "the first part for all",
            "old": "part * num_slots + slot",
            "new": "slot",
            "sizes": _PARTS,
        },
        {
            "name": "the first adapter for all chunks",
            "old": "* num_slots + slot",
            "new": "* num_slots",
            "sizes": _PARTS,
        },
        {
            "name": "each part in the first columns",
            "old": "end += rank;",
            "new": "end = rank;",
            "sizes": _PARTS,
        },
        {
            "name": "a block with columns of one part only",
            "old": "end < first + kColumns && first < end + rank",
            "new": "end <= first && first < end + rank",
            "sizes": _PARTS,
        },
        {
            "name": "rows of A ahead of the part",
            "old": "row >= 0 && row < rank",
            "new": "row < rank",
            "sizes": _PARTS,
        },
        {
            "name": "sums of a column behind the ranks",
            "old": "column >= count || !chunk",
            "new": "!chunk",
            "sizes": _ONE_PART,
        },
        {
            "name": "padding taken for a token",
            "old": "return ids[place] < tokens;",
            "new": "return ids[place] <= tokens;",
            "header": _CHUNK,
            "sizes": _PARTS,
        },
        {
            "name": "the tokens of the first chunk for all",
            "old": "sorted_token_ids + int64_t(blockIdx.x) * CHUNK",
            "new": "sorted_token_ids",
            "sizes": _PARTS,
        },
        {
            "name": "tiles of a chunk left out",
            "old": "while (count < most && has(16 * count))",
            "new": "while (count + 1 < most && has(16 * count))",
            "header": _CHUNK,
            "needs": _LARGE,
            "sizes": _FULL,
        },
        {
            "name": "the second eight tokens of a tile take the first",
            "old": "tile * 16 + half * 8 + g",
            "new": "tile * 16 + g",
            "sizes": _FULL,
        },
        {
            "name": "sums of the wrong half",
            "old": "partial[warp][g + s / 2 * 8][n * 8 + 2 * t + s % 2]",
            "new": "partial[warp][g + s % 2 * 8][n * 8 + 2 * t + s / 2]",
            "sizes": _FULL,
        },
        {
            "name": "other elements of x than of A",
            "old": "{low.v[j], high.v[j], low.v[j + 1], high.v[j + 1]}",
            "new": "{low.v[j + 1], high.v[j + 1], low.v[j], high.v[j]}",
            "sizes": _PARTS,
        },
        {
            "name": "float32: one column for two",
            "old": "a[s % kOwn].v[j]",
            "new": "a[0].v[j]",
            "needs": _FLOAT,
            "sizes": _PARTS,
        },
        {
            "name": "the group's first columns for all",
            "old": "first + 8 * n + (kMma",
            "new": "first + (kMma",
            "needs": _LARGE,
            "sizes": _PARTS,
        },
        {
            "name": "misaligned vectors",
            "old": "is_vector_aligned(row + i) && ",
            "new": "",
            "header": _CHUNK,
            "sizes": _ODD,
        },
        {
            "name": "vectors past the end of a row",
            "old": " && i + kSize <= size) return",
            "new": ") return",
            "header": _CHUNK,
            "sizes": [SHRINK_SIZES[2]],
        },
        {
            "name": "elements past the end of a row",
            "old": "    if (j < left) words",
            "new": "    words",
            "header": _CHUNK,
            "sizes": _ODD,
        },
        {
            "name": "dropped tail of a row",
            "old": "if (begin + s * turn >= input_size) break;",
            "new": "if (begin + s * turn + kStep > input_size) break;",
            "sizes": _ODD,
        },
        {
            "name": "each warp at the first steps only",
            "old": "begin += kAhead * turn",
            "new": "begin += input_size",
            "sizes": _LONG,
            "needs": _LARGE,
        },
        {
            "name": "rows taken as dense",
            "old": "x + chunk.token(place) * x_stride",
            "new": "x + chunk.token(place) * input_size",
            "sizes": _STRIDED,
        },
        {
            "name": "rows of h taken as those of another width",
            "old": "chunk.token(place) * h_stride",
            "new": "chunk.token(place) * input_size",
            "sizes": _PARTS,
        },
        {
            "name": "rows of h in the order of the chunk",
            "old": "h[chunk.token(place) * h_stride",
            "new": "h[int64_t(place) * h_stride",
            "sizes": _PARTS,
        },
        {
            "name": "dropped barrier before the sums are read",
            "old": "    __syncthreads();\n    for (int i = threadIdx.x",
            "new": "    for (int i = threadIdx.x",
            "sizes": _LONG,
        },
        {
            "name": "dropped barrier before the sums are reused",
            "old": "    if (tile) __syncthreads();  // the sums before have been read\n",
            "new": "",
            "needs": _LARGE,
            "sizes": _FULL,
            "seeds": 3,
        },
        {
            "name": "the last warp left out of the sum",
            "old": "w < warps;",
            "new": "w + 1 < warps;",
            "sizes": _LONG,
        },
    ]
] + [
    {"kernel": "lora_chunked_expand", **fault}
    for fault in [
        {
            "name": "the first slot without its tokens",
            "old": "if (slot < 0) return;",
            "new": "if (slot <= 0) return;",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "the first part for all",
            "old": "part * num_slots + slot",
            "new": "slot",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "the second part up to the end of the first",
            "old": "part == 1 ? end1",
            "new": "part == 1 ? end0",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "each part from the first column on",
            "old": "start += size;",
            "new": "",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "the columns of the first part for all",
            "old": "before += rank_table[at];",
            "new": "",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "tiles of the parts ahead not counted",
            "old": "    block -= blocks;\n",
            "new": "    block = 0;\n",
            "sizes": _OUT_TILES,
        },
        {
            "name": "the last tile of each part left out",
            "old": "(size + kBlockColumns - 1) / kBlockColumns",
            "new": "max(size / kBlockColumns, 1)",
            "sizes": _OUT_TILES,
        },
        {
            "name": "blocks behind the last tile at work",
            "old": "if (part == num_parts) return;",
            "new": "if (part == num_parts) --part;",
            "sizes": _OUT_SPARE,
        },
        {
            "name": "parts without a rank at work",
            "old": "if (rank == 0) return;",
            "new": "",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "no scale",
            "old": "more[j] = kiln::mul_rn(kiln::mul_rn(more[j], scale[half].back), factor);",
            "new": "more[j] = kiln::mul_rn(more[j], scale[half].back);",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "the power of two not undone",
            "old": "kiln::mul_rn(more[j], scale[half].back)",
            "new": "more[j]",
            "needs": _HALF,
            "sizes": _OUT_PARTS,
        },
        {
            "name": "h beyond the numbers of fp16",
            "old": "kNarrow<kiln::fp16> = true",
            "new": "kNarrow<kiln::fp16> = false",
            "needs": _HALF,
            "sizes": _OUT_LIFT,
        },
        {
            "name": "the lower digits of a neighbour",
            "old": "T{uint16_t(high[r] >> 16)}",
            "new": "T{uint16_t(high[r])}",
            "sizes": _OUT_ONE,
        },
        {
            "name": "written instead of added",
            "old": "kiln::add_rn(kiln::to_float(y.v[j]), more[j])",
            "new": "more[j]",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "h behind the rank",
            "old": "h[half] && k < rank ?",
            "new": "h[half] ?",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "rows of B behind the rank",
            "old": "k0 + row < work.rank && left > 0",
            "new": "left > 0",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "the next ranks of h not loaded",
            "old": "        own.load(work, k0 + k + 16, scale, t);\n",
            "new": "",
            "sizes": _OUT_ONE,
        },
        {
            "name": "the last ranks left out",
            "old": "(work.rank - k0 + 15) / 16 * 16",
            "new": "max((work.rank - k0) / 16 * 16, 16)",
            "sizes": _OUT_UNEVEN,
        },
        {
            "name": "the first ranks of B for all",
            "old": "work.b + int64_t(k0 + row) * work.size",
            "new": "work.b + int64_t(row) * work.size",
            "sizes": _OUT_ONE,
        },
        {
            "name": "dropped barrier before B is read",
            "old": "      __syncthreads();\n      for (int k = 0",
            "new": "      for (int k = 0",
            "sizes": _OUT_TILES,
        },
        {
            "name": "dropped barrier before B is reused",
            "old": "      if (k0) __syncthreads();  // all warps are done with the rows before\n",
            "new": "",
            "sizes": _OUT_ONE,
            "seeds": 3,
        },
        {
            "name": "no wait for the copies",
            "old": "      kiln::copy_wait<0>();\n",
            "new": "",
            "sizes": _OUT_TILES,
        },
        {
            "name": "the lower halves of B twice",
            "old": "high, b[2 * m], b[2 * m + 1]",
            "new": "high, b[0], b[1]",
            "sizes": _OUT_ONE,
        },
        {
            "name": "neighbours keep their own numbers",
            "old": "t % 2 ? low : high, 1)",
            "new": "t % 2 ? high : low, 1)",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "misaligned copies",
            "old": "size % kSize == 0 && kiln::is_vector_aligned(b)",
            "new": "kiln::is_vector_aligned(b)",
            "sizes": _OUT_ODD,
        },
        {
            "name": "misaligned rows",
            "old": "size % 4 == 0 && out_stride % kSize == 0 &&",
            "new": "size % 4 == 0 &&",
            "sizes": _OUT_ROWS,
        },
        {
            "name": "vectors in a part that they do not fill",
            "old": "size % 4 == 0 && ",
            "new": "",
            "sizes": _OUT_UNFILLED,
        },
        {
            "name": "columns past the end of a part",
            "old": "if (j < left) kiln::from_float",
            "new": "kiln::from_float",
            "sizes": _OUT_ONE,
        },
        {
            "name": "one tile of tokens for all warps",
            "old": "warp % kRowWarps * 16 + g",
            "new": "g",
            "needs": _LARGE,
            "sizes": _OUT_FULL,
        },
        {
            "name": "float32: the first tokens of a tile for the second",
            "old": "{work.own(0, k), work.own(1, k)}",
            "new": "{work.own(0, k), work.own(0, k)}",
            "needs": _FLOAT,
            "sizes": _OUT_FULL,
        },
        {
            "name": "rows taken as dense",
            "old": "out + token[half] * out_stride",
            "new": "out + token[half] * outputs",
            "sizes": _OUT_TILES,
        },
    ]
]  # fmt: skip
