"""Faults planted in the product of a few rows; see test_faults.py. linear_groups.py has more."""

from functools import partial

from skinny_products import alone, chained, planted

from kiln.jit_kernels.ops.linear.cases import SIZES

_HEADER, _WORDS = {"header": "linear/operands.cuh"}, {"header": "kiln/rows/words.cuh"}
_INT8, _FP16 = {"header": "kiln/ptx/int8.cuh"}, {"scalar_t": "kiln::fp16"}
_X_PLAIN, _X_CODED, _X_INT8 = ({"input": one} for one in ("Plain", "E4M3", "I8"))
_TWO_TILES = {"tiles": "2"}

# One block and few inputs; strided rows; chunks for every warp, and a part of one; rows of odd
# size; rows that are not aligned; many outputs, scales of blocks for each; fewer inputs than a
# vector has.
_ONE, _STRIDED, _LONG, _ODD, _UNALIGNED, _BY_ROW, _SHORT = ([one] for one in SIZES[:7])

_ROWS = [
    ("outputs behind the weights loaded", "min(first + group + more, outputs - 1)",
     "first + group + more", _SHORT),
    ("the output before the last stands in", "group + more, outputs - 1)",
     "group + more, outputs - 2)", _ODD),
    ("the second half of the outputs is the first", "high = own(first, 8), g",
     "high = own(first, 0), g", _ONE),
    ("the first outputs in every block", "blockIdx.x * kOutputs", "0 * kOutputs", _STRIDED),
    ("rows of x that do not exist", "min(n * 8 + group, run.count - 1)", "(n * 8 + group)", _ONE),
    ("the row before the last stands in", "min(n * 8 + group, run.count - 1)",
     "min(n * 8 + group, run.count - 2)", _STRIDED),
    ("rows of x of the first tile", "min(n * 8 + group, run.count - 1)",
     "min(group, run.count - 1)", _ONE, _TWO_TILES),
    ("rows of x taken as dense", "m * x_stride + own_x", "m * inputs + own_x", _STRIDED),
    ("rows of weights taken as dense", "low * weight_stride", "low * int64_t(inputs)", _STRIDED),
    ("rows of out taken as dense", "(run.first + m) * out_stride + n",
     "(run.first + m) * outputs + n", _STRIDED),
]  # fmt: skip

_CHUNKS = [
    ("elements behind the end of a row", "  if (k >= inputs) return Words{};\n", "", _LONG),
    ("a row without the vector at its end", "  if (k >= inputs) return",
     "  if (k + WEIGHT::kElements >= inputs) return", _ONE),
    ("elements behind the end of an odd row", "min(inputs - k, 8)", "8", _ODD),
    ("elements of words that are left out", "    if (j < left) words", "    words", _SHORT, _WORDS),
    ("vectors in rows that are not aligned", "    if (!aligned) return", "    if (false) return",
     _UNALIGNED),
    ("the same chunks in every warp", "begin = warp * kTurn * kChunk", "begin = 0", _STRIDED),
    ("the first chunk of each pair twice", "kTurn - 1 ? 1 :", "kTurn - 1 ? 0 :", _LONG),
    ("chunks between the turns of the warps", "kTurn * (kWarps - 1) + 1", "kTurn * kWarps + 1",
     _LONG),
    ("every other turn left out", "k += kStep)", "k += 2 * kStep)", _LONG),
    ("x of the first turn", "        xs[n] += kStep;\n", "", _LONG),
    ("x of the first chunk of a turn", "xs[n] + (c + a) * kChunk", "xs[n] + c * kChunk", _LONG),
    ("x behind the end of a row in the second chunk", "k + (c + a) * kChunk, v",
     "k + c * kChunk, v", _LONG),
    ("weights of the chunks ahead not loaded",
     "ahead[s].load(chunks[(c + a) % kAhead][s], scales, zeros, inputs, aligned);", "", _LONG),
    ("weights that do not go on", "    low += kFourBits ? step / 2 : step;\n", "", _LONG),
    ("weights behind the end of a row", "    k += step;\n", "", _LONG),
    ("the first chunk in place of the second", "chunks[(c + a) % kAhead][s], w[a]",
     "chunks[c % kAhead][s], w[a]", _LONG),
    ("the second chunk of a turn not loaded at first", "ahead[s].load(chunks[c][s]",
     "ahead[s].load(chunks[0][s]", _LONG),
    ("x of the first tile", "w[a][n], v)", "w[a][0], v)", _ONE, _TWO_TILES),
    ("other elements of x than of the weights", "own.w[p],", "own.w[p + 1],", _ONE),
    ("weights of the rows g for those of g + 8",
     "{low.w[p], high.w[p], low.w[p + 1], high.w[p + 1]}",
     "{low.w[p], low.w[p], low.w[p + 1], low.w[p + 1]}", _ONE),
]  # fmt: skip

_SETS = [
    ("weights of the first 16 outputs for 32", "walk_of(first + s * kOfSet)", "walk_of(first)",
     _STRIDED),
    ("chunks of the first 16 outputs for 32", "% kAhead][s], w[a]", "% kAhead][0], w[a]", _STRIDED),
    ("only the first 16 outputs go on", "ahead[s].advance(c + kAhead + a)",
     "ahead[0].advance(c + kAhead + a)", _LONG),
    ("sums of the first 16 outputs for 32", "sum[s][n][j] : mul_rn", "sum[0][n][j] : mul_rn",
     _STRIDED),
    ("sums of 16 outputs over those before", "column = s * 16 + group", "column = group", _STRIDED),
    ("sums of the second tile over the first", "row = n * 8 + lane % 4", "row = lane % 4", _ONE),
]  # fmt: skip

_CODES = [
    ("pairs of codes in another order", "from.w[2 * p], to.w[0], to.w[1]",
     "from.w[2 * p], to.w[1], to.w[0]", _ONE, _X_PLAIN, _HEADER),
    ("both vectors of x with the first weights", "piece = v * kOfVector + i",
     "piece = v * kOfVector", _ONE, _X_PLAIN),
    ("the second vector of x is the first", "row + w * kStep", "row", _ONE, _X_PLAIN),
    ("the first codes of x for all", "i % kOfVector, 0)", "0, 0)", _ONE, _X_CODED),
    ("lanes at the distance of plain x", "(kFourBits ? 8 : WEIGHT::kElements)", "8", _ONE,
     _X_PLAIN),
    ("the scale of x forgotten", "own = mul_rn(own, of_x[(run.first + m) * row + index * column]);",
     "own = mul_rn(own, 1.0f);", _ONE, _X_CODED),
    ("the scale of the rows g for g + 8", "of_expert + (high >> outputs_log2)",
     "of_expert + (low >> outputs_log2)", _ONE, _X_CODED),
    ("the scales of other sums of a lane", "scale[j / 2]", "scale[j % 2]", _ONE, _X_PLAIN),
    ("scales of x behind the last row", "j % 2, run.count - 1)", "j % 2, 15)", _ONE, _X_CODED),
    ("scales of x of the first tile", "min(tile * 8 + int(", "min(int(", _LONG, _X_CODED,
     _TWO_TILES),
    ("scales of the first 16 outputs for 32",
     "own(first + s * kOfSet, 0), high = own(first + s * kOfSet, 8)",
     "own(first, 0), high = own(first, 8)",
     _STRIDED, _X_PLAIN, _TWO_TILES),
    ("the sums in place of those with scales", "SCALED == kNone ? sum", "SCALED != kByBlock ? sum",
     _ONE, _X_CODED),
]  # fmt: skip

# Of int8. Codes in another order show beside x in its own.
_OCTETS = [
    ("pairs of int8 in another order", "unpack_int8<T>(from.w[2 * p], to.w[0], to.w[1])",
     "unpack_int8<T>(from.w[2 * p], to.w[1], to.w[0])", _ONE, _X_PLAIN, _HEADER),
    ("four int8 of eight twice", "unpack_int8<T>(from.w[2 * p + 1]", "unpack_int8<T>(from.w[2 * p]",
     _ONE, _X_INT8, _HEADER),
    ("the first four int8 for all", "unpack_int8<T>(from.w[2 * p]", "unpack_int8<T>(from.w[0]",
     _ONE, _X_INT8, _HEADER),
    ("the sign of even int8 lost", "(low & 0xff80ff80", "(low & 0xff80ff00", _ONE, _X_PLAIN, _INT8),
    ("the sign of int8 in the upper half lost", "(high & 0xff80ff80", "(high & 0xff00ff00", _ONE,
     _X_INT8, _INT8),
    ("the sign bit of int8 counted twice", "low & 0xff7fff7f", "low", _ONE, _X_PLAIN, _INT8),
    ("the lowest bit of odd int8 lost", "high & 0xff7fff7f", "high & 0xff7eff7f", _ONE, _X_INT8,
     _INT8),
    ("the upper int8 of a word first", "(four, false), high = below_ones<T>(four, true)",
     "(four, true), high = below_ones<T>(four, false)", _ONE, _X_PLAIN, _INT8),
    ("the int8 of a pair in another order", "(two & 0xff) | (two & 0xff00) << 8",
     "(two & 0xff) << 16 | (two & 0xff00) >> 8", _ONE, _X_PLAIN, _INT8),
    ("ones of bf16 in fp16", "<fp16> = 0x64646464", "<fp16> = 0x43434343", _ONE, _X_PLAIN, _INT8,
     _FP16),
    ("minus one of bf16 in fp16", "? 0xbc00bc00", "? 0xbf80bf80", _ONE, _X_INT8, _INT8, _FP16),
]  # fmt: skip

_BLOCKS = [
    ("a scale for each output of a block", "of_expert + (low >> outputs_log2)", "of_expert + (low)",
     _UNALIGNED, _X_PLAIN),
    ("a scale for each 128 outputs of many", ">> outputs_log2", ">> 7", _BY_ROW, _X_PLAIN),
    ("columns behind the scales forgotten", "(low >> outputs_log2) * scale_columns",
     "(low >> outputs_log2) * (inputs / kBlock)", _BY_ROW, _X_PLAIN),
    ("scales of x by column taken as by row", "m) * row + index * column", "m) * row + index",
     _STRIDED, _X_CODED),
    ("scales of x by row taken as by column", "m) * row + index * column", "m) + index * column",
     _BY_ROW, _X_CODED),
    ("the scale of the first block for all", "n, k / kBlock", "n, 0", _STRIDED, _X_CODED),
    ("the scale of the block behind", "k / kBlock", "k / kBlock + 1", _LONG, _X_CODED, _TWO_TILES),
    ("the scales of the first 16 outputs alone", "add_scaled(s, n, k", "add_scaled(0, n, k",
     _BY_ROW, _X_CODED, _TWO_TILES),
    ("the sums of a block in the next", "      sum[j] = 0;\n", "", _LONG, _X_CODED),
    ("the last block alone", "fma_rn(sum[j], own, total[j])", "mul_rn(sum[j], own)", _LONG,
     _X_CODED),
]  # fmt: skip

_SUMS = [
    ("no barrier before the sums are read", "    __syncthreads();  // also", "    // also", _LONG,
     {"seeds": 3}),
    ("the last warp left out", "w < kWarps; ++w", "w < kWarps - 1; ++w", _LONG),
    ("sums of the outputs g + 8 over g", "+ group + j / 2 * 8;", "+ group;", _ONE),
    ("sums of odd rows over even ones", "lane % 4 * 2 + j % 2, column", "lane % 4 * 2, column",
     _LONG),
    ("one row behind the last written", "m < run.count && ", "m <= run.count && ", _STRIDED),
    ("the last row not written", "m < run.count && ", "m < run.count - 1 && ", _LONG),
    ("outputs behind the last written", " && n < outputs)", ")", _ODD),
    ("the last outputs left out", "first < outputs; first +=",
     "first + kOutputs < outputs; first +=", _ODD),
    ("the bias of the first outputs", "* outputs + n])", "* outputs + column])", _ODD),
]  # fmt: skip

_WAIT = "  pdl_wait();\n  pdl_launch"
_EARLY = [
    ("no wait for the kernel ahead", _WAIT, "  pdl_launch"),
    ("x read before the wait", _WAIT,
     "  if (static_cast<const Input*>(x)->bits == 1) return;\n" + _WAIT),
]  # fmt: skip

# Another order of sums, which float32 rounds to another result.
_FOUR_BITS = {"weight": "U4"}
_ORDER = [
    ("kNone", "the last warp first with two tiles", "sums[buffer][w][m]",
     "sums[buffer][TILES == 1 ? w : kWarps - w][m]"),
    ("kNone", "the last warp first for more rows than one", "sums[buffer][w][m]",
     "sums[buffer][rows == 1 ? w : kWarps - w][m]"),
    ("kByOutput", "chunks of other warps with two tiles", "begin = warp *",
     "begin = (warp + TILES) % kWarps *"),
    ("kByBlock", "scales of blocks added another way with two tiles",
     "fma_rn(sum[j], own, total[j])",
     "TILES == 1 ? fma_rn(sum[j], own, total[j]) : add_rn(mul_rn(sum[j], own), total[j])"),
    ("kBy32", "chunks of 4-bit codes of other warps with two tiles", "begin = warp *",
     "begin = (warp + TILES) % kWarps *", _FOUR_BITS),
    ("kBy64", "scales of groups added later with two tiles",
     "if (kFourBits && SCALED > 1 && (piece + 1) * kGroups % kPieces == 0)",
     "if (TILES == 1 ? (piece + 1) * kGroups % kPieces == 0 : true)", _FOUR_BITS),
]  # fmt: skip


def _another_order(scaled, name, old, new, needs=_X_PLAIN):
    scenario = {"scenario": partial(alone, needs={"scaled": scaled, **needs})}
    return planted(scaled, name, old, new, needs, scenario)


FAULTS = [
    *(planted("kNone", *fault) for fault in (*_ROWS, *_CHUNKS, *_SUMS)),
    *(planted("kNone", *fault, _TWO_TILES) for fault in _SETS),
    *(planted("kByOutput", *fault, {"weight": "E4M3"}) for fault in _CODES),
    *(planted("kByOutput", *fault, {"weight": "I8"}) for fault in _OCTETS),
    *(planted("kByBlock", *fault, {"weight": "E4M3"}) for fault in _BLOCKS),
    *(planted("kNone", *fault, {"scenario": chained}) for fault in _EARLY),
    *(_another_order(*fault) for fault in _ORDER),
]
