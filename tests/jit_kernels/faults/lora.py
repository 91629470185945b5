"""Faults planted in the LoRA kernels; see test_faults.py."""

from kiln.jit_kernels.ops.lora.cases import (
    EMBEDDING_SIZES,
    TILED_EXPAND_SIZES,
    TILED_SHRINK_SIZES,
)

_SEEDS = {"seeds": 3}
_FLOAT, _HALF = {"needs": {"scalar_t": "float"}}, {"needs": {"scalar_t": "kiln::fp16"}}
_TABLES = {"header": "lora/parts.cuh"}
_SUMS, _SUMS_FLOAT = {"header": "lora/shrink_mma.cuh"}, {"header": "lora/shrink_fma.cuh", **_FLOAT}
_ADD, _ADD_FLOAT = {"header": "lora/expand_mma.cuh"}, {"header": "lora/expand_fma.cuh", **_FLOAT}
_ADD_HALF = {**_ADD, **_HALF}
_ACQ_REL = "inc, counter, last, cuda_host::acq_rel"
_SIZE = "(int(input_size) + 32 * kSlices - 1) / (32 * kSlices) * 32"
_TOKENS = "tile_tokens + int64_t(blockIdx.y) * tile"

# Of shrink: rows of odd size; three parts; rows of which no vectors are aligned; strided rows;
# several warps a slice; large tiles of such rows; tiles of which some are full; batches of loads;
# large tiles whose blocks have several slices in turn; rows of x alone not aligned.
_ODD, _PARTS, _UNALIGNED, _STRIDED, _LONG, _LARGE, _FULL, _BATCHES, _TURNS, _ROWS = (
    [TILED_SHRINK_SIZES[i]] for i in (3, 4, 5, 6, 7, 8, 9, 11, 12, 13)
)
SHRINK = [
    ("empty tiles at work", "if (slot < 0 || !a.row(column))", "if (!a.row(column))", _FULL),
    ("blocks without a column at work", "slot < 0 || !a.row(column)", "slot < 0", _PARTS),
    ("the first adapter for all tiles", "max(slot, 0));", "0);", _PARTS),
    ("the slot of the first tile", "tile_slots + blockIdx.y", "tile_slots", _PARTS),
    ("the tokens of the first tile", _TOKENS, "tile_tokens", _PARTS),
    ("columns without a rank", "token < 0 || !a.row(column + c)", "token < 0", _ODD),
    ("tokens of -1 written", "token < 0 || !a.row(column + c)", "!a.row(column + c)", _PARTS),
    ("the end of a row in no slice", _SIZE, "int(input_size) / (32 * kSlices) * 32", _LONG),
    ("slices overlap", "min((s + 1) * size", "min((s + 2) * size", _LONG),
    ("a slice for each group alone", "begin < kSlices; begin += spread * groups",
     "begin < groups; begin += 8", _TURNS, _FLOAT),
    ("no barrier before the sums are read", "tokens, tile);\n      __syncthreads();",
     "tokens, tile);", _LONG, _SEEDS),
    ("no barrier before the sums are reused", "      __syncthreads();  // the next slices", "//",
     _TURNS, {**_FLOAT, **_SEEDS}),
    ("no barrier before the slices are added", "tokens)) {\n    __syncthreads();", "tokens)) {",
     _TURNS, _SEEDS),
    ("warps without a slice at work", "group < groups;", "true;", _TURNS, _FLOAT),
    ("a plain counter", "kiln::arrive(arrivals, kSlices - 1)", "(*arrivals)++", _LONG),
    ("a counter that is not reset", "kiln::arrive(arrivals, kSlices - 1)",
     "kiln::add_acq_rel(arrivals, 1)", _LONG),
    ("arrival without an order", _ACQ_REL, _ACQ_REL.replace("acq_rel", "relaxed"), _LONG,
     {"header": "kiln/ptx/memory.cuh", **_SEEDS}),
    ("the first takes itself for the last", "return *shared == kSlices - 1", "return *shared == 0",
     _LONG),
    ("the last but one reads the sums too", "return *shared == kSlices - 1",
     "return *shared >= kSlices - 2", _LONG, _SEEDS),
    ("no barrier before the count is read", "  __syncthreads();\n  return", "  return", _LONG,
     _SEEDS),
    ("one counter for all columns", "(gridDim.x / spread) + place;", "(gridDim.x / spread);", _ODD,
     _SEEDS),
    ("one counter for all tiles", "arrivals + blockIdx.y * ", "arrivals + 0 * ", _PARTS, _SEEDS),
    ("one place for the sums of all columns", "gridDim.x + place * spread)", "gridDim.x)", _ODD),
    ("one place for the sums of all tiles", "(int64_t(blockIdx.y) * gridDim.x + ", "(", _PARTS),
    ("sums of slices over those of warps", "shared + groups * warps * elements", "shared", _TURNS,
     {**_FLOAT, **_SEEDS}),
    ("groups of warps share their sums", "shared + (group * warps) * elements", "shared", _TURNS,
     {**_FLOAT, **_SEEDS}),
    ("the last warp left out", "w < warps;", "w + 1 < warps;", _LONG),
    ("the last slice left out", "s < kSlices; ++s)", "s < kSlices - 1; ++s)", _LONG),
    ("rows of h of another width", "h[token * h_stride", "h[token * input_size", _PARTS),
    ("all columns in the first ones", "h_stride + column + c]", "h_stride + c]", _PARTS),
    ("each part in the first columns", "      c -= ranks[part];\n", "", _PARTS, _TABLES),
    ("rows ahead of the part", "c >= 0 && c < ranks[part]", "c < ranks[part]", _PARTS, _TABLES),
    ("tables of the first part", "part * num_slots + slot", "slot", _PARTS, _TABLES),
    ("elements behind the end of a row", "    if (j < left) words", "    words", _UNALIGNED,
     {"header": "kiln/rows/words.cuh"}),
    ("vectors in rows that they do not fill", "a.size % 8 == 0 && ", "", _ODD, _SUMS),
    ("misaligned vectors of x", "x_stride % 8 == 0 && ", "", _ROWS, _SUMS),
    ("rows of x taken as dense", "load_early(tokens) : token) * x_stride",
     "load_early(tokens) : token) * a.size", _STRIDED, _SUMS),
    ("the last group of 32 left out", "for (; begin < slice.end;",
     "for (; begin + 32 <= slice.end;", _FULL, _SUMS),
    ("the last group of 32 taken as whole", "slice.end & ~31", "slice.end", _FULL, _SUMS),
    ("whole groups twice", "  if (begin < full) begin += (full", "  if (false) begin += (full",
     _PARTS, _SUMS),
    ("the last whole group twice", "(full - begin + step - 1) / step", "(full - begin) / step",
     _LONG, _SUMS),
    ("every other batch", "begin += kBatch * step", "begin += 2 * kBatch * step", _BATCHES, _SUMS),
    ("a batch of one group", "if (begin + j * step < full) multiply", "if (j == 0) multiply",
     _BATCHES, _SUMS),
    ("a batch behind the whole groups", "if (begin + j * step < full) multiply", "multiply",
     _LONG, _SUMS),
    ("the second half of the rows is the first", "group + j / 2 * 8]", "group]", _ODD, _SUMS),
    ("columns of the first half in the second", "*row1 = a.row(column + group + 8)",
     "*row1 = a.row(column + group)", _ODD, _SUMS),
    ("rows without a column", "  if (!row1) row1 = row0;\n", "", _ODD, _SUMS),
    ("tokens of another lane", "lane % 4 * 2 + j % 2]", "lane % 4 * 2]", _PARTS, _SUMS),
    ("other elements of x than of A", "x.w[0], x.w[1]", "x.w[1], x.w[0]", _PARTS, _SUMS),
    ("half of a group", "{u.w[2], v.w[2], u.w[3], v.w[3]}", "{}", _PARTS, _SUMS),
    ("the first eight tokens for all", "tokens + (first + n) * 8", "tokens + n * 8", _LARGE, _SUMS),
    ("sums of all in the first eight tokens", "sums[(first + n) * 8", "sums[n * 8", _LARGE, _SUMS),
    ("the first quarter of a large tile", "tokens + n * 8 + lane / 4", "tokens + lane / 4", _TURNS,
     _SUMS),
    ("the sums of a slice's first warp alone", "warp ? add_rn(total[n][j], sum[n][j]) : sum[n][j]",
     "warp ? total[n][j] : sum[n][j]", _TURNS, _SUMS),
    ("the sums of one warp in those of the next", "        sum[n][j] = 0;\n", "", _TURNS, _SUMS),
    ("the groups of a slice's first warp alone", "ends ? warp + 1 : group", "group", _TURNS, _SUMS),
    ("elements behind the slice", "    if (i >= slice.end) return next;\n", "", _TURNS, _SUMS),
    ("rows of x of padding", "token < 0 ? load_early(tokens) : token", "token", _PARTS, _SUMS),
    ("float32: the last element left out", "i < slice.end;", "i + 1 < slice.end;", _UNALIGNED,
     _SUMS_FLOAT),
    ("float32: rows without a column", "if (rows[j]) sum", "sum", _ODD, _SUMS_FLOAT),
    ("float32: padding taken for tokens", "if (token < 0) continue;", "", _ODD, _SUMS_FLOAT),
    ("float32: the last tokens left out", "t < tile &&", "t < tile - kFew &&", _FULL, _SUMS_FLOAT),
    ("float32: each warp at all groups", "i += 32 * slice.warps", "i += 32", _LONG, _SUMS_FLOAT),
    ("float32: all columns in the first ones", "sums[t + n][c + j]", "sums[t + n][j]", _ODD,
     _SUMS_FLOAT),
]  # fmt: skip

# Of expand: three parts; a grid with a spare block; full tiles; rows of h at any address; h that is
# large, h that is small, and sums that cancel; parts of several warps; large tiles; parts that
# begin at any column; rows of out at any address.
(_OUT_PARTS, _OUT_SPARE, _OUT_FULL, _OUT_UNEVEN, _OUT_LIFT, _OUT_SMALL, _OUT_CANCELS, _OUT_WIDE,
 _OUT_LARGE, _OUT_BEGIN, _OUT_ROWS) = (
    [TILED_EXPAND_SIZES[i]] for i in (4, 6, 10, 11, *range(13, 20))
)  # fmt: skip
EXPAND = [
    ("empty tiles at work", "slot < 0 || part < 0", "part < 0", _OUT_FULL),
    ("blocks behind the last part at work", "slot < 0 || part < 0", "slot < 0", _OUT_SPARE),
    ("blocks of the parts ahead not counted", "else block -= blocks;", "else block = 0;",
     _OUT_SPARE),
    ("the last block of a part left out", "(of_part + width - 1) / width",
     "max(of_part / width, 1)", _OUT_SPARE),
    ("columns of h of the first part", "if (p < part) column", "if (false) column", _OUT_PARTS),
    ("columns of h behind the part's own", "if (p < part) column", "column", _OUT_PARTS),
    ("parts without a rank at work", "  if (own.rank == 0) return kiln::pdl_wait();\n", "",
     _OUT_PARTS),
    ("all parts in the first columns", "{out + start,", "{out,", _OUT_PARTS),
    ("the third part at the second", "{0, end0, end1, outputs}", "{0, end0, end0, outputs}",
     _OUT_PARTS),
    ("the tokens of the first tile", _TOKENS, "tile_tokens", _OUT_PARTS),
    ("the slot of the first tile", "tile_slots + blockIdx.y", "tile_slots", _OUT_PARTS),
    ("the scale of the first part", "scale_table + at", "scale_table + slot", _OUT_PARTS),
    ("B of the first part", "b_table + at", "b_table + slot", _OUT_PARTS),
    ("the columns of the first block", "own, block * width + ", "own, ", _OUT_SPARE),
    ("the columns of the first warp", "int(threadIdx.x) / 32 * kiln::kWarpColumns);", "0);",
     _OUT_SPARE),
    ("the low part of h left out", "mma_m16n8k16<T>(sum[n], h.low, b0, b1);", "", _OUT_CANCELS,
     _ADD),
    ("the low part of a neighbour", "b - high_half<T>(high)", "b - low_half<T>(high)", _OUT_CANCELS,
     _ADD),
    ("h behind the rank", "token < 0 || k >= tile.rank", "token < 0", _OUT_LARGE, _ADD),
    ("h of padding", "token < 0 || k >= tile.rank", "k >= tile.rank", _OUT_WIDE, _ADD),
    ("rows of B behind the rank", "k >= tile.rank || o >= tile.size) return Four",
     "o >= tile.size) return Four", _OUT_LARGE, _ADD),
    ("the first 16 ranks of B for all", "ranks_of_b(tile, start, first), half", "b, half",
     _OUT_WIDE, _ADD),
    ("the first 16 ranks of h for all", "scale, start),\n", "scale, 0),\n", _OUT_WIDE, _ADD),
    ("the ranks of another lane", "start + lane % 4 * 4 + i,", "start + lane % 4 + i * 4,",
     _OUT_WIDE, _ADD),
    ("ranks in another order", "multiply<T>(sum, h, b, half)", "multiply<T>(sum, h, b, 0)",
     _OUT_WIDE, _ADD),
    ("odd columns of B for even ones", "n % 2 ? a >> 16", "n % 2 == 0 ? a >> 16", _OUT_WIDE, _ADD),
    ("B of the first half of the columns", "first + half * 32 + lane / 4 * 4",
     "first + lane / 4 * 4", _OUT_WIDE, _ADD),
    ("the first eight tokens for all", "four_of_h(tile, tokens[j], start", "four_of_h(tile, "
     "tokens[0], start", _OUT_LARGE, _ADD),
    ("columns in another order", "[2 * j + w / 2]", "[2 * j + w % 2]", _OUT_WIDE, _ADD),
    ("no scale", "      own[i] = mul_rn(own[i], scale);\n", "", _OUT_WIDE, _ADD),
    ("written instead of added", "add_rn(low_half<T>(y.w[w]), own[0])", "own[0]", _OUT_WIDE, _ADD),
    ("rows of out taken as dense", "rows[j] = tile.out + tokens[j] * tile.out_stride",
     "rows[j] = tile.out + tokens[j] * tile.size", _OUT_WIDE, _ADD),
    ("tokens of -1 read", "if (tokens[j] >= 0 && o < tile.size) y", "if (o < tile.size) y",
     _OUT_WIDE, _ADD),
    ("tokens of -1 written", "tokens[j] >= 0 && o < tile.size)\n        store", "o < tile.size)\n"
     "        store", _OUT_WIDE, _ADD),
    ("columns behind the part", "tokens[j] >= 0 && o < tile.size)\n        store",
     "tokens[j] >= 0)\n        store", _OUT_WIDE, _ADD),
    ("vectors of h that begin or end in another part", "starts % 16 == 0 && ", "", _OUT_WIDE,
     _ADD),
    ("vectors in a part of odd size", "tile.size % 8 == 0 &&", "", _OUT_BEGIN, _ADD),
    ("vectors in rows at any address", "tile.out_stride % 8 == 0 && ", "", _OUT_ROWS, _ADD),
    ("vectors of h in rows at any address", "tile.h_stride % 4 == 0 && ", "", _OUT_UNEVEN, _ADD),
    ("vectors in part of a rank", "tile.rank % 4 == 0", "true", _OUT_WIDE, _ADD),
    ("the first 16 tokens of a tile", "place += kRows", "place += tile.count", _OUT_LARGE, _ADD),
    ("the first 16 tokens of a tile twice", "load_early(tile.tokens + place + group)",
     "load_early(tile.tokens + group)", _OUT_LARGE, _ADD),
    ("tiles of less than eight tokens left out", "tokens[0] >= 0) == 0", "tokens[0] >= 0) != ~0u",
     _OUT_WIDE, _ADD),
    ("h beyond the numbers of fp16", "kNarrow<fp16> = true", "kNarrow<fp16> = false", _OUT_LIFT,
     _ADD_HALF),
    ("h below the numbers of fp16", "kNarrow<fp16> = true", "kNarrow<fp16> = false", _OUT_SMALL,
     _ADD_HALF),
    ("the power of two not undone", "own[i] = mul_rn(own[i], row.back)", "", _OUT_WIDE, _ADD_HALF),
    ("one power of two for all tokens", "four.x[1], scale[j]", "four.x[1], scale[0]", _OUT_LARGE,
     _ADD_HALF),
    ("float32: padding taken for tokens", "if (token < 0) return;", "", _OUT_PARTS, _ADD_FLOAT),
    ("float32: h behind the rank", "k < tile.rank;", "k <= tile.rank;", _OUT_PARTS, _ADD_FLOAT),
    ("float32: columns behind the part", "min(first + kWarpColumns, tile.size)",
     "first + kWarpColumns", _OUT_PARTS, _ADD_FLOAT),
    ("float32: h of the first token", "tile.h + token * tile.h_stride", "tile.h", _OUT_FULL,
     _ADD_FLOAT),
    ("float32: the first tokens alone", "place < tile.count", "place < 8", _OUT_FULL, _ADD_FLOAT),
]  # fmt: skip

_IDS = [EMBEDDING_SIZES[3]]
EMBEDDING = [
    ("padding taken for tokens", "if (token < 0) return;", "", _IDS),
    ("the tokens of the first tile", "int64_t(blockIdx.x) * warps", "0", _IDS),
    ("the slot of the first tile", "tile_slots[blockIdx.x]", "tile_slots[0]", _IDS),
    ("the rank of the first slot", "rank_table[slot]", "rank_table[1]", _IDS),
    ("columns of the token's place", "token_ids[token] * rank", "token * rank", _IDS),
    ("the first columns alone", "k < rank; k += 32", "k < rank && k < 32; k += 32", _IDS),
    ("columns behind the rank", "k < rank; k += 32", "k <= rank; k += 32", _IDS),
    ("rows of h of another width", "token * h_stride + k", "token * rank + k", _IDS),
]  # fmt: skip

FAULTS = [
    {"kernel": kernel, "name": name, "old": old, "new": new, "sizes": sizes, **dict(*more)}
    for kernel, faults in (
        ("lora_shrink", SHRINK),
        ("lora_expand", EXPAND),
        ("lora_shrink_embedding", EMBEDDING),
    )
    for name, old, new, sizes, *more in faults
]
