"""Faults planted in the LoRA kernels; see test_faults.py."""

from kiln.jit_kernels.ops.lora.cases import EMBEDDING_SIZES, EXPAND_SIZES, SHRINK_SIZES

_SHRINK = dict(enumerate(SHRINK_SIZES))
_EXPAND = dict(enumerate(EXPAND_SIZES))
# Of shrink: one part; three parts; a width that no vectors fill; strided rows; several warps.
_ONE_PART, _PARTS, _ODD, _STRIDED, _LONG = ([_SHRINK[i]] for i in (3, 4, 5, 6, 7))
# Of expand, in that order, then tiles that vectors fill, and a grid with a spare block.
_OUT_ONE, _OUT_PARTS, _OUT_ODD, _OUT_TILES, _OUT_SPARE = ([_EXPAND[i]] for i in (3, 4, 5, 6, 7))
_IDS = [EMBEDDING_SIZES[3]]

FAULTS = [
    {"kernel": "lora_shrink", **fault}
    for fault in [
        {
            "name": "tokens without an adapter take the slot ahead of the first",
            "old": "if (slot < 0) return;",
            "new": "",
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
            "old": "column < kColumns && first + column < end",
            "new": "column < kColumns",
            "sizes": _ONE_PART,
        },
        {
            "name": "misaligned vectors",
            "old": "kiln::is_vector_aligned(row) && ",
            "new": "",
            "sizes": _ODD,
        },
        {
            "name": "vectors past the end of a row",
            "old": " && i + Vector::kSize <= size",
            "new": "",
            "sizes": [_SHRINK[2]],
        },
        {
            "name": "elements past the end of a row",
            "old": "i + j < size ? row[i + j] : SCALAR_T{}",
            "new": "row[i + j]",
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
            "old": "h[token * h_stride",
            "new": "h[token * end",
            "sizes": _PARTS,
        },
        {
            "name": "dropped barrier before the sums are read",
            "old": "  __syncthreads();\n  const int column",
            "new": "  const int column",
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
            "old": "if (slot < 0) return;",
            "new": "",
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
            "old": "    column += rank;\n",
            "new": "",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "tiles of the parts ahead not counted",
            "old": "    tile -= tiles;\n",
            "new": "    tile = 0;\n",
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
            "old": "if (part == num_parts || rank == 0) return;",
            "new": "if (rank == 0) return;",
            "sizes": _OUT_SPARE,
        },
        {
            "name": "parts without a rank at work",
            "old": "if (part == num_parts || rank == 0) return;",
            "new": "if (part == num_parts) return;",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "no scale",
            "old": "kiln::mul_rn(sum[j], scale)",
            "new": "sum[j]",
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
            "old": "k < rank; ++k",
            "new": "k + 1 < rank; ++k",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "B by output, then by rank",
            "old": "b + int64_t(k) * size + o",
            "new": "b + int64_t(o) * rank + k",
            "sizes": _OUT_PARTS,
        },
        {
            "name": "misaligned vectors",
            "old": "kiln::is_vector_aligned(b) && kiln::is_vector_aligned(y);",
            "new": "kiln::is_vector_aligned(b);",
            "sizes": [_EXPAND[2]],
        },
        {
            "name": "vectors in a part that they do not fill",
            "old": "size % kSize == 0 && ",
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
