"""Faults planted in the product of a few rows; see test_faults.py."""

from functools import partial

from skinny_products import alone, chained

from kiln.jit_kernels.ops.linear.cases import SIZES
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM

_HEADER, _WORDS = {"header": "linear/operands.cuh"}, {"header": "kiln/rows/words.cuh"}
_X_PLAIN, _X_CODED = {"input": "Plain"}, {"input": "E4M3"}
_TWO_TILES = {"tiles": "2"}

# One block and few inputs; strided rows; chunks for every warp, and a part of one; rows of odd
# size; rows that are not aligned; scales of blocks for each output; fewer inputs than a vector has.
_ONE, _STRIDED, _LONG, _ODD, _UNALIGNED, _BY_ROW, _SHORT, _EXPERTS = ([one] for one in SIZES)

_ROWS = [
    ("the last outputs loaded behind the weights", "min(first + group, outputs - 1)",
     "first + group", _SHORT),
    ("outputs of the second half behind the weights", "min(first + group + 8, outputs - 1)",
     "first + group + 8", _LONG),
    ("the second half of the outputs is the first", "min(first + group + 8, outputs - 1)",
     "min(first + group, outputs - 1)", _ONE),
    ("the first outputs in every block", "blockIdx.x * kOutputs", "0 * kOutputs", _STRIDED),
    ("rows of x that do not exist", "n * 8 + group < rows ?", "true ?", _ONE),
    ("rows of x of the first tile", "(n * 8 + group) * x_stride", "group * x_stride", _ONE,
     _TWO_TILES),
    ("rows of x taken as dense", "(n * 8 + group) * x_stride", "(n * 8 + group) * inputs",
     _STRIDED),
    ("rows of weights taken as dense", "low * weight_stride", "low * int64_t(inputs)", _STRIDED),
    ("rows g + 8 of weights taken as dense", "high * weight_stride", "high * int64_t(inputs)",
     _STRIDED),
    ("rows of out taken as dense", "m * out_stride + n", "m * outputs + n", _STRIDED),
]  # fmt: skip

_CHUNKS = [
    ("elements behind the end of a row", "  if (k >= inputs) return Words{};\n", "", _LONG),
    ("the last chunk of a row taken as whole", "  if (k >= inputs) return",
     "  if (k / kChunk * kChunk >= inputs) return", _LONG),
    ("a row without the vector at its end", "  if (k >= inputs) return",
     "  if (k + WEIGHT::kElements >= inputs) return", _ONE),
    ("elements behind the end of an odd row", "min(inputs - k, 8)", "8", _ODD),
    ("elements of words that are left out", "    if (j < left) words", "    words", _SHORT,
     _WORDS),
    ("the odd elements of words left out", "for (int j = 0; j < 8; ++j)",
     "for (int j = 0; j < 8; j += 2)", _UNALIGNED, _WORDS),
    ("vectors in rows that are not aligned", "    if (!aligned) return", "    if (false) return",
     _UNALIGNED),
    ("the same chunks in every warp", "i / 2 * kWarps + warp) * 2", "i / 2 * kWarps) * 2",
     _STRIDED),
    ("the first chunk of each pair twice", "* 2 + i % 2) * kChunk", "* 2) * kChunk", _LONG),
    ("chunks between the turns of the warps", "(i / 2 * kWarps + warp)",
     "(i / 2 * (kWarps + 1) + warp)", _LONG),
    ("every chunk twice", "i += kAhead)", "i += 1)", _LONG),
    ("half of the chunks left out", "i += kAhead)", "i += 2 * kAhead)", _LONG),
    ("weights of the chunks ahead not loaded", "u[j] = part_of_row<true>(row0, at(i + kAhead + j)",
     "u[j] = part_of_row<true>(row0, at(i + j)", _LONG),
    ("weights g + 8 of the chunks ahead not loaded",
     "v[j] = part_of_row<true>(row1, at(i + kAhead + j)",
     "v[j] = part_of_row<true>(row1, at(i + j)", _LONG),
    ("x of the chunk before", "load_inputs(xs[n], at(i + j)", "load_inputs(xs[n], at(i)", _LONG),
    ("x of the first tile", "multiply(sum[n], u[j], v[j], w[j][n])",
     "multiply(sum[n], u[j], v[j], w[j][0])", _ONE, _TWO_TILES),
    ("half of each chunk multiplied", "p < kPairs; p += 2", "p < kPairs / 2; p += 2", _ONE),
    ("other elements of x than of the weights", "own.w[p], own.w[p + 1]", "own.w[p + 1], own.w[p]",
     _ONE),
    ("weights of the rows g for those of g + 8", "{u.w[q], v.w[q], u.w[q + 1], v.w[q + 1]}",
     "{u.w[q], u.w[q], u.w[q + 1], u.w[q + 1]}", _ONE),
]  # fmt: skip

_CODES = [
    ("pairs of codes in another order", "to.w[2 * i], to.w[2 * i + 1]",
     "to.w[2 * i + 1], to.w[2 * i]", _ONE, _X_PLAIN, _HEADER),
    ("the first codes of 16 bytes for all", "unpack_e4m3<T>(from.w[i]", "unpack_e4m3<T>(from.w[0]",
     _ONE, _X_CODED, _HEADER),
    ("both vectors of x with the first weights", "const int q = i * kPairs + p;",
     "const int q = p;", _ONE, _X_PLAIN),
    ("the second vector of x is the first", "k + v * INPUT::kElements", "k", _ONE, _X_PLAIN),
    ("lanes at the distance of plain x", "lane % 4 * WEIGHT::kElements",
     "lane % 4 * INPUT::kElements", _ONE, _X_PLAIN),
    ("the scale of a row forgotten", "own = mul_rn(own, of_x[", "own = mul_rn(1.0f, of_x[", _ONE,
     _X_CODED),
    ("the scale of x forgotten", "own = mul_rn(own, of_x[m * row + index * column]);",
     "own = mul_rn(own, 1.0f);", _ONE, _X_CODED),
    ("the scale of the rows g for g + 8", "scales + (high >> outputs_log2)",
     "scales + (low >> outputs_log2)", _ONE, _X_CODED),
    ("the scales of other sums of a lane", "scale[j / 2]", "scale[j % 2]", _ONE, _X_PLAIN),
    ("scales of x behind the last row", "j % 2, rows - 1)", "j % 2, 15)", _ONE, _X_CODED),
    ("the scale of x for the last row of all", "j % 2, rows - 1)", "j % 2, rows - 2)", _LONG,
     _X_CODED),
    ("scales of x of the first tile", "min(tile * 8 + int(", "min(int(", _LONG, _X_CODED,
     _TWO_TILES),
    ("the sums in place of those with scales", "SCALED == kNone ? sum",
     "SCALED != kByBlock ? sum", _ONE, _X_CODED),
]  # fmt: skip

_BLOCKS = [
    ("two chunks ahead where one is", "part_of_row<true>(row0, at(i + kAhead + j)",
     "part_of_row<true>(row0, at(i + 2 + j)", _LONG, _X_CODED, _TWO_TILES),
    ("a scale for each output of a block", "scales + (low >> outputs_log2)", "scales + (low)",
     _UNALIGNED, _X_PLAIN),
    ("a scale for each output g + 8 of a block", "scales + (high >> outputs_log2)",
     "scales + (high)", _UNALIGNED, _X_PLAIN),
    ("a scale for each 128 outputs of many", ">> outputs_log2", ">> 7", _BY_ROW, _X_PLAIN),
    ("columns behind the scales forgotten", "(low >> outputs_log2) * int64_t(scale_columns)",
     "(low >> outputs_log2) * int64_t(inputs / kBlock)", _BY_ROW, _X_PLAIN),
    ("columns behind the scales g + 8 forgotten", "(high >> outputs_log2) * int64_t(scale_columns)",
     "(high >> outputs_log2) * int64_t(inputs / kBlock)", _BY_ROW, _X_PLAIN),
    ("scales of x by column taken as by row", "m * row + index * column", "m * row + index",
     _STRIDED, _X_CODED),
    ("scales of x by row taken as by column", "m * row + index * column", "m + index * column",
     _BY_ROW, _X_CODED),
    ("the scale of the first block for all", "n, at(i) / kBlock", "n, 0", _STRIDED, _X_CODED),
    ("blocks counted by each warp", "n, at(i) / kBlock", "n, i / 2", _STRIDED, _X_CODED),
    ("the scale of the block behind", "at(i) / kBlock", "at(i + 1) / kBlock", _LONG, _X_CODED,
     _TWO_TILES),
    ("the scale of every other block for two", "(i + kAhead) % 2 == 0", "(i + kAhead) % 4 == 0",
     _LONG, _X_CODED),
    ("blocks that begin with their second chunk", "(i + kAhead) % 2 == 0",
     "(i + kAhead) % 2 != 0", _STRIDED, _X_CODED, _TWO_TILES),
    ("three chunks in flight", "TILES > 1 ? 1 : 2", "TILES > 1 ? 1 : 3", _LONG, _X_CODED),
    ("the sums of a block in the next", "      sum[j] = 0;\n", "", _LONG, _X_CODED),
    ("the last block alone", "fma_rn(sum[j], own, total[j])", "mul_rn(sum[j], own)", _LONG,
     _X_CODED),
]  # fmt: skip

_SUMS = [
    ("no barrier before the sums are read", "  __syncthreads();\n", "", _LONG, {"seeds": 3}),
    ("half of the warps", "kWarps = 16,", "kWarps = 8,", _STRIDED),
    ("the last warp left out", "w < kWarps; ++w", "w < kWarps - 1; ++w", _LONG),
    ("the first warp twice", "for (int w = 1;", "for (int w = 0;", _ONE),
    ("sums of the second tile over the first", "sums[warp][n * 8 + lane % 4", "sums[warp][lane % 4",
     _ONE, _TWO_TILES),
    ("sums of the outputs g + 8 over g", "[group + j / 2 * 8] =", "[group] =", _ONE),
    ("sums of odd rows over even ones", "lane % 4 * 2 + j % 2][group", "lane % 4 * 2][group",
     _LONG),
    ("rows behind the last written", "m >= rows || ", "", _ONE),
    ("one row behind the last written", "m >= rows || ", "m > rows || ", _STRIDED),
    ("the last row not written", "m >= rows || ", "m >= rows - 1 || ", _LONG),
    ("outputs behind the last written", " || n >= outputs) return", ") return", _ODD),
    ("no bias", "if (bias) y", "if (false) y", _ODD),
    ("the bias of the first outputs", "to_float(bias[n])", "to_float(bias[column])", _ODD),
]  # fmt: skip

_EARLY = [
    ("no wait for the kernel ahead", "  pdl_wait();\n", ""),
    ("x read before the wait", "  pdl_wait();\n",
     "  if (load_inputs(xs[0], own, inputs, aligned).words[0].w[0] == 1) return;\n  pdl_wait();\n"),
]  # fmt: skip


# Another order of sums, which float32 rounds to another result.
_ORDER = [
    ("kNone", "the last warp first with two tiles", "sums[w][m][column]);",
     "sums[TILES == 1 ? w : kWarps - w][m][column]);"),
    ("kNone", "the last warp first for more rows than one", "sums[w][m][column]);",
     "sums[rows == 1 ? w : kWarps - w][m][column]);"),
    ("kByOutput", "chunks of other warps with two tiles", "+ warp) * 2",
     "+ (warp + TILES) % kWarps) * 2"),
    ("kByBlock", "scales added by chunk with two tiles", "(i + kAhead) % 2 == 0", "true"),
]  # fmt: skip


def _fault(scaled, name, old, new, sizes, *more):
    """Arguments of Fault; ``more``: values of the variant, or further arguments."""
    fault = {"kernel": "skinny_gemm", "name": name, "old": old, "new": new, "sizes": sizes}
    needs = {"scalar_t": "kiln::bf16", "scaled": scaled, "tiles": "1"}
    for one in more:
        (needs if one.keys() <= SKINNY_GEMM.params.keys() else fault).update(one)
    return {**fault, "needs": needs}


FAULTS = [
    *(_fault("kNone", *fault) for fault in (*_ROWS, *_CHUNKS, *_SUMS)),
    *(_fault("kByOutput", *fault) for fault in _CODES),
    *(_fault("kByBlock", *fault) for fault in _BLOCKS),
    *(_fault("kNone", *fault, None, {"scenario": chained}) for fault in _EARLY),
    *(
        _fault(scaled, *fault, None, {"scenario": partial(alone, scaled=scaled)})
        for scaled, *fault in _ORDER
    ),
]
