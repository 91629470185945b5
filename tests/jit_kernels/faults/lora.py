"""Faults planted in the LoRA kernels; see test_faults.py."""

from kiln.jit_kernels.ops.lora.cases import EMBEDDING_SIZES, EXPAND_SIZES, SHRINK_SIZES

_RUNS = "lora/runs.cuh"
_SHRINK = dict(enumerate(SHRINK_SIZES))
_EXPAND = dict(enumerate(EXPAND_SIZES))
# Of shrink: one part; three parts; a width that no vectors fill; strided rows; several warps;
# several tokens a block.
_ONE_PART, _PARTS, _ODD, _STRIDED, _LONG, _TILED = ([_SHRINK[i]] for i in (3, 4, 5, 6, 7, 8))
# Of expand, in that order, then tiles that vectors fill, and a grid with a spare block.
_OUT_ONE, _OUT_PARTS, _OUT_ODD, _OUT_TILES, _OUT_SPARE = ([_EXPAND[i]] for i in (3, 4, 5, 6, 7))
_IDS = [EMBEDDING_SIZES[3]]

FAULTS = [
    {"kernel": "lora_shrink", **fault}
    for fault in [
        {
            "name": "tokens without an adapter take the slot ahead of the first",
            "old": "if (slot >= 0) of(",
            "new": "of(",
            "header": _RUNS,
            "sizes": _ONE_PART,
        },
        {
            "name": "parts of another site",
            "old": "int64_t(rows[part]) * num_slots",
            "new": "int64_t(part) * num_slots",
            "sizes": _PARTS,
        },
        {
            "name": "the first adapter for all tokens",
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
            "name": "sums of a column behind the ranks",
            "old": "token < tokens && column < columns.count",
            "new": "token < tokens",
            "sizes": _ONE_PART,
        },
        {
            "name": "sums of a token behind the run",
            "old": "token < tokens && column < columns.count",
            "new": "column < columns.count",
            "sizes": _ONE_PART,
        },
        {
            "name": "the first token's row of x for a whole run",
            "old": "part_of_row(x + t * x_stride, i",
            "new": "part_of_row(x, i",
            "sizes": _TILED,
        },
        {
            "name": "a token behind a run left out",
            "old": "first += count;",
            "new": "first += count + (count > 1);",
            "header": _RUNS,
            "sizes": _TILED,
        },
        {
            "name": "one adapter for a whole tile",
            "old": "token_slots[first + count] == slot",
            "new": "true",
            "header": _RUNS,
            "sizes": _TILED,
        },
        {
            "name": "tokens behind the last",
            "old": "end = min(begin + tile, tokens);",
            "new": "end = begin + tile;",
            "sizes": _TILED,
        },
        {
            "name": "dropped barrier before the sums are reused",
            "old": "  __syncthreads();  // the run before has read its sums\n",
            "new": "",
            "sizes": _TILED,
            "seeds": 3,
        },
        {
            "name": "misaligned vectors",
            "old": "kiln::is_vector_aligned(row) && ",
            "new": "",
            "sizes": _ODD,
        },
        {
            "name": "vectors past the end of a row",
            "old": " && i + Vector::kSize <= size) return",
            "new": ") return",
            "sizes": [_SHRINK[2]],
        },
        {
            "name": "elements past the end of a row",
            "old": "j < left ? p[j] : SCALAR_T{}",
            "new": "p[j]",
            "sizes": _ODD,
        },
        {
            "name": "dropped tail of a row",
            "old": "i < input_size; i += step",
            "new": "i + Vector::kSize <= input_size; i += step",
            "sizes": _ODD,
        },
        {
            "name": "rows taken as dense",
            "old": "x + token * x_stride",
            "new": "x + token * input_size",
            "sizes": _STRIDED,
        },
        {
            "name": "rows of h taken as those of another width",
            "old": "h + token * h_stride + first",
            "new": "h + token * input_size + first",
            "sizes": _PARTS,
        },
        {
            "name": "dropped barrier before the sums are read",
            "old": "  __syncthreads();\n  const int token",
            "new": "  const int token",
            "sizes": _LONG,
        },
        {
            "name": "the last warp left out of the sum",
            "old": "w < warps;",
            "new": "w + 1 < warps;",
            "sizes": _LONG,
        },
    ]
] + [
    {"kernel": "lora_expand", **fault}
    for fault in [
        {
            "name": "tokens without an adapter take the slot ahead of the first",
            "old": "if (slot >= 0) of(",
            "new": "of(",
            "header": _RUNS,
            "sizes": _OUT_ONE,
        },
        {
            "name": "parts of another site",
            "old": "int64_t(rows[part]) * num_slots",
            "new": "int64_t(part) * num_slots",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "the columns of the first part for all",
            "old": "column += rank_table",
            "new": "column = 0 * rank_table",
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
            "old": "(size + columns - 1) / columns",
            "new": "max(size / columns, 1)",
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
            "old": "kiln::mul_rn(sum[t][j], run.scale)",
            "new": "sum[t][j]",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "written instead of added",
            "old": "kiln::add_rn(kiln::to_float(y.v[j]), more)",
            "new": "more",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "the last of the ranks left out",
            "old": "k < run.rank; ++k",
            "new": "k + 1 < run.rank; ++k",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "B by output, then by rank",
            "old": "run.b + int64_t(k) * run.size + o",
            "new": "run.b + int64_t(o) * run.rank + k",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "misaligned vectors",
            "old": "kiln::is_vector_aligned(run.b) && kiln::is_vector_aligned(run.out);",
            "new": "kiln::is_vector_aligned(run.b);",
            "sizes": [_EXPAND[2]],
        },
        {
            "name": "vectors in a part that they do not fill",
            "old": "run.size % kSize == 0 && ",
            "new": "",
            "sizes": _OUT_ODD,
        },
        {
            "name": "columns past the end of a part",
            "old": "min(first + columns, size)",
            "new": "first + columns",
            "sizes": _OUT_ONE,
        },
        {
            "name": "the first token's h for a whole run",
            "old": "run.h[t * run.h_stride + k]",
            "new": "run.h[k]",
            "sizes": [_EXPAND[8]],
        },
        {
            "name": "vectors in rows that are not aligned behind the first",
            "old": "(run.tokens == 1 || run.out_stride % kSize == 0) &&",
            "new": "",
            "sizes": [_EXPAND[9]],
        },
        {
            "name": "tokens behind the last",
            "old": "end = min(begin + tile, tokens);",
            "new": "end = begin + tile;",
            "sizes": [_EXPAND[8]],
        },
        {
            "name": "rows taken as dense",
            "old": "out + token * out_stride",
            "new": "out + token * part_starts[num_parts]",
            "sizes": _OUT_TILES,
        },
    ]
] + [
    {"kernel": "lora_shrink_embedding", "sizes": _IDS, **fault}
    for fault in [
        {
            "name": "tokens without an adapter take the slot ahead of the first",
            "old": "if (slot < 0) return;",
            "new": "",
        },
        {
            "name": "columns of the token's place, not of its id",
            "old": "token_ids[token] * rank",
            "new": "token * rank",
        },
        {
            "name": "the first columns alone",
            "old": "k < rank; k += blockDim.x",
            "new": "k < rank && k < int(blockDim.x); k += blockDim.x",
        },
        {
            "name": "columns behind the rank",
            "old": "k < rank; k += blockDim.x",
            "new": "k <= rank; k += blockDim.x",
        },
        {
            "name": "the embedding of another model",
            "old": "int64_t(rows[0]) * num_slots",
            "new": "0 * num_slots",
        },
    ]
]  # fmt: skip
