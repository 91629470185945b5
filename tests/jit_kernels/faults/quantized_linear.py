"""Faults planted in the product with quantised weights; see test_faults.py."""

from functools import partial

from quantized_products import chained, sorted_ahead, whole

from kiln.jit_kernels.ops.quantized_linear.cases import SIZES
from kiln.jit_kernels.ops.quantized_linear.spec import QUANTIZED_GEMM

_WEIGHTS, _ROWS, _CODES = (
    {"header": f"{name}.cuh"}
    for name in ("quantized_linear/weights", "quantized_linear/rows", "kiln/math/four_bits")
)  # fmt: skip
_E2M1 = {"weight": "E2M1", "group": "32"}
_FINE, _HALVES, _ALL = {"group": "32"}, {"group": "64"}, {"group": "0"}
_LARGE, _I8 = {"tile_rows": "64"}, {"weight": "I8", "group": "0"}

# One run of rows and one chunk more; strided rows, a bias; several runs, odd outputs; four slices;
# few experts with many rows; many experts and two slices.
_ONE, _STRIDED, _ODD, _LONG, _EXPERTS, _MANY = ([one] for one in SIZES)

_PLACES = [
    ("the first outputs in every block", "place / split * kOutputs", "0 * kOutputs", _ODD),
    ("the same slice in every block", "part = place % split;", "part = 0;", _LONG),
    ("slices that begin with the first chunk", "chunks * part >> slices_log2 : 0", "0 : 0", _LONG),
    ("slices up to the last chunk", "chunks * (part + 1) >> slices_log2 : chunks",
     "chunks : chunks", _LONG),
    ("the rows of the first run", "x + run.first * x_stride", "x", _ODD),
    ("rows of x taken as dense", "x_stride, run.count, inputs}", "inputs, run.count, inputs}",
     _STRIDED),
    ("rows of out taken as dense", "(run.first + m) * out_stride", "(run.first + m) * outputs",
     _STRIDED),
    ("all runs to the first rows", "(run.first + m) * out_stride", "m * out_stride", _ODD),
    ("rows behind the last written", "        if (m >= run.count) break;\n", "", _STRIDED),
    ("the last row of a run not written", "if (m >= run.count)", "if (m >= run.count - 1)", _ODD),
    ("codes of the first expert", "codes + (of_expert + first) * of_row",
     "codes + int64_t(first) * of_row", _EXPERTS),
    ("codes of the first outputs", "codes + (of_expert + first) * of_row",
     "codes + of_expert * of_row", _ODD),
    ("scales of the first expert", "(of_scales + (first >> shared_log2)) * columns",
     "int64_t(first) * columns", _EXPERTS),
    ("scales of the first outputs", "(of_scales + (first >> shared_log2)) * columns",
     "of_scales * columns", _ODD),
    ("scales behind the last output", "(min(int(threadIdx.x), last) >> shared_log2) * columns",
     "int(threadIdx.x) * columns", _ODD),
    ("one scale for all groups", "GROUP > 0 ? chunks * kGroups : 1", "1", _STRIDED),
    ("a run left out", "block += gridDim.y)", "block += gridDim.y + 1)", _EXPERTS),
]  # fmt: skip

_RING = [
    ("a tile read before it has arrived", "copy_wait<kStages - 2>", "copy_wait<kStages - 1>",
     _LONG),
    ("no barrier before a tile", "      __syncthreads();  // the c-th tiles", "      // the c-th",
     _LONG),
    ("a tile over one that is read", "(stage == 0 ? kStages - 1 : stage - 1)", "(stage)", _LONG),
    ("the tile after the next", "ahead = c + kStages - 1", "ahead = c + kStages", _LONG),
    ("the ring has a place less", "stage == kStages - 1 ? 0", "stage == kStages - 2 ? 0", _LONG),
    ("the first tiles of x left out", "begin + s < end) own.fetch", "begin + s < 0) own.fetch",
     _ONE),
    ("only the first tile of codes ahead", "begin + s < end) weights.fetch",
     "s < 1) weights.fetch", _LONG),
    ("scales over those that are read", "next.store(factors[1 - now])", "next.store(factors[now])",
     _LONG),
    ("scales of the next chunk twice", "source.load((c + 2)", "source.load((c + 1)", _LONG),
    ("scales of the first chunk twice", "source.load((begin + 1)", "source.load(begin", _LONG),
    ("scales of the first slice", "GROUP > 0 ? begin * kGroups : 0", "0", _LONG),
    ("scales of even chunks for all", "(c - begin) % 2 : 0", "0 : 0", _LONG),
]  # fmt: skip

_MULTIPLY = [
    ("outputs g for those of g + 8", "{low[i], high[i], low[i + 1], high[i + 1]}",
     "{low[i], low[i], low[i + 1], low[i + 1]}", _ONE),
    ("inputs of x in another order", "b.w[i],\n                          b.w[i + 1]);",
     "b.w[i + 1],\n                          b.w[i]);", _ONE),
    ("half of each word multiplied", "i < 4; i += 2", "i < 2; i += 2", _ONE),
    ("x of the first step", "4 * (step * kPieces + j)", "4 * j", _ONE, _FINE),
    ("x of the first word of a step", "4 * (step * kPieces + j)", "4 * (step * kPieces)", _ONE),
    ("x of the first 8 rows", "row + n * 8 * X::kPitch", "row", _STRIDED),
    ("codes of the first step", "codes[o].w[j] = codes[o].w[j + kPieces]",
     "codes[o].w[j] = codes[o].w[j]", _ONE, _FINE),
    ("codes of 16 outputs for 32", "Tile::place(own_output() + 8 * o",
     "Tile::place(own_output() + o % 2 * 8", _ONE),
    ("zero points of 16 outputs for 32", "factors.zero[q][own_output() + 8 * o]",
     "factors.zero[q][own_output() + o % 2 * 8]", _STRIDED),
    ("scales of 16 outputs for 32", "scales[own_output() + 8 * o]",
     "scales[own_output() + o % 2 * 8]", _STRIDED),
    ("outputs of the first warp", "threadIdx.x / 32 * 32 + lane() / 4", "lane() / 4", _ONE),
    ("zero points of the first group", "factors.zero[q]", "factors.zero[0]", _STRIDED, _HALVES),
    ("scales of the first group", "factors.scale[q]", "factors.scale[0]", _STRIDED, _FINE),
    ("e2m1 scales of the first group", "factors.scale[q]", "factors.scale[0]", _STRIDED, _E2M1),
    ("the last group alone", "fma_rn(part[o / 2][n][o % 2 * 2 + j], scale, sum)",
     "mul_rn(part[o / 2][n][o % 2 * 2 + j], scale)", _LONG),
    ("groups added without their scales", "fma_rn(part[o / 2][n][o % 2 * 2 + j], scale, sum)",
     "add_rn(part[o / 2][n][o % 2 * 2 + j], sum)", _ONE),
    ("sums of the outputs g for g + 8", "part[o / 2][n][o % 2 * 2 + j]", "part[o / 2][n][j]", _ONE),
    ("the second half of the rows left out", "kTiles = TILE_ROWS / 8", "kTiles = 4", _ODD, _LARGE),
]  # fmt: skip

_FINISH = [
    ("a slice that ends too early", "c + 1 == chunks * (slice", "c + 2 == chunks * (slice", _LONG),
    ("the scale of all inputs forgotten", "GROUP > 0 ? own : mul_rn(own, scale)", "own", _ONE,
     _ALL),
    ("sums of odd rows over even ones", "lane() % 4 * 2 + j) * kPitch", "lane() % 4 * 2) * kPitch",
     _ONE),
    ("no cluster barrier before the sums are read",
     "    if (apart) cluster_sync();\n    else __syncthreads();\n    // Each",
     "    __syncthreads();\n    // Each", _LONG),
    ("no barrier before the sums are read",
     "    if (apart) cluster_sync();\n    else __syncthreads();\n    // Each",
     "    if (apart) cluster_sync();\n    // Each", _ODD),
    ("sums lost before peers have read them", "if (apart) cluster_sync();  // before",
     "if (false) cluster_sync();  // before", _LONG),
    ("the second slice left out", "if (p < parts) y.v[i]", "if (p > 1 && p < parts) y.v[i]", _LONG),
    ("the last slice left out", "if (p < parts) y.v[i]", "if (p < parts - 1) y.v[i]", _LONG),
    ("the first slice for all", "map_shared(at, base + p)", "map_shared(at, base)", _LONG),
    ("own sums for those of the first slice", "parts > 1 ? map_shared(at, base) : at", "at", _LONG),
    ("slices of the cluster's first blocks", "int(cluster_rank()) - part", "int(cluster_rank())",
     _MANY),
    ("every block of a cluster stores all rows", "own_part = apart ? part : 0", "own_part = 0",
     _LONG),
    ("half of the rows of a block", "r += 4 * parts *", "r += 8 * parts *", _ODD),
    ("every other row left out", "if (r + 4 * parts * i < run.count)", "if (i == 0)", _ODD),
    ("no bias", "if (bias && i < left)", "if (false)", _STRIDED),
    ("the bias of the first outputs", "bias ? bias + n : nullptr", "bias", _STRIDED),
    ("outputs behind the last written", "    if (i < left) from_float", "    from_float", _ODD),
    ("four outputs at once where there are fewer", "aligned && left >= 4", "aligned && left > 0",
     _STRIDED),
    ("four outputs at once that are not aligned", "aligned && left >= 4", "left >= 4", _ODD),
    ("pairs of outputs in another order", "pack<T>(y[0], y[1])", "pack<T>(y[1], y[0])", _ONE),
]  # fmt: skip

_IN_WEIGHTS = [
    ("codes behind the last output", "ends ? 0 : left - row", "ends ? 0 : kOutputs", _STRIDED),
    ("codes of the first chunk", "(row * stride + chunk * kRowBytes", "(row * stride", _ONE),
    ("rows of codes of one chunk", "row * stride + chunk", "row * kRowBytes + chunk", _ONE),
    ("a quarter of the outputs", "i < kOutputs; i += kRows", "i < 32; i += kRows", _ONE),
    ("scales of the first groups", "scales + first + (offset + group)", "scales + first + offset",
     _ONE),
    ("zero points of the first groups", "zeros + first + (offset + group)",
     "zeros + first + offset", _STRIDED),
    ("another zero point if none is given", "kPlain = 8", "kPlain = 7", _ONE),
    ("zero points that are given ignored", "if (zeros) own", "if (false) own", _STRIDED),
    ("the zero point of a chunk's first group", "(zero.v[q])", "(zero.v[0])", _STRIDED, _FINE),
    ("the scale of a chunk's first group", "scale_of(scale.v[q])", "scale_of(scale.v[0])",
     _STRIDED, _HALVES),
    ("half of a power of two", "power_of_two(exponent)", "power_of_two(exponent - 1)", _ONE,
     _E2M1),
]  # fmt: skip

_IN_ROWS = [
    ("elements behind the end of a row", "k < inputs ? count - row : 0", "count - row", _STRIDED),
    ("rows of x behind the last", "k < inputs ? count - row : 0", "k < inputs ? kRows : 0",
     _STRIDED),
    ("the first piece of a row for all", "chunk * 128 + piece * 8", "chunk * 128", _ONE),
    ("the first chunk of a row for all", "chunk * 128 + piece * 8", "piece * 8", _ONE),
    ("a run that is not full left out", "(end[i] - begin + kRows - 1) / kRows",
     "(end[i] - begin) / kRows", _EXPERTS),
    ("each lane's first row is that of its end", "begin = lane ? before : last", "begin = before",
     _EXPERTS),
    ("expert 32 begins with the first row", "last = __shfl_sync(kAll, end[i], 31)", "last = 0",
     _MANY),
    ("runs counted from expert 32 on", "runs = __shfl_sync(kAll, upto, 31)", "runs = 0", _MANY),
    ("the run before", "upto > block", "upto >= block", _EXPERTS),
    ("runs that go on to the next expert", "min(end[i] - first, kRows)", "kRows", _EXPERTS),
    ("the first run of an expert for all", "(block - (upto - own)) * kRows", "0", _EXPERTS),
    ("the first expert of each 32", "__shfl_sync(kAll, e + 32 * i, from)",
     "__shfl_sync(kAll, e + 32 * i, 0)", _EXPERTS),
    ("experts behind 32 taken for those before", "__shfl_sync(kAll, e + 32 * i, from)",
     "__shfl_sync(kAll, e, from)", _MANY),
    ("runs behind the last expert's", "experts ? ends[e + 32 * i] : -1",
     "experts + 1 ? ends[e + 32 * i] : -1", _EXPERTS),
]  # fmt: skip

_IN_CODES = [
    ("codes without their highest bit", "& 0x000f000f", "& 0x00070007", _ONE),
    ("the zero point of even codes alone", "* 0x10001", "* 0x1", _STRIDED),
    ("zero points added", "kLift<T> | 0x80008000", "kLift<T>", _STRIDED),
    ("every other pair 16 times as large", "high, kLift16th<T>", "high, kLift<T>", _STRIDED),
    ("the sign of odd codes lost", "(top & 0x80008000)", "(top & 0x00008000)", _ONE, _E2M1),
    ("twice the exponent", "(kHalf ? 3 : 6)", "(kHalf ? 3 : 5)", _ONE, _E2M1),
    ("codes of fp16 as of bf16", "kHalf ? 0x74007400", "!kHalf ? 0x74007400", _ONE, _E2M1),
    ("pairs of e2m1 in another order", "12 - 4 * p", "4 * p", _ONE, _E2M1),
]  # fmt: skip

# Of 8 bits. A row of E4M3 has scales for blocks of 128 inputs; those of 64 rows take four steps.
_OF_BYTES = [
    ("x of the first half of a tile", "8 * (step / kOfHalf)", "0 * (step / kOfHalf)", _ONE),
    ("x of the first step of a half", "step % kOfHalf * kPieces + j", "j", _ODD, _LARGE),
    ("pieces of x side by side", "lane() % 4 * 2 + step", "lane() % 4 + step", _ONE),
    ("the first half of each row of codes", "4 * (step / kOfHalf) + lane() % 4", "lane() % 4",
     _ONE),
    ("the first codes of each half", "tile += step % kOfHalf * kWords * 4", "tile += 0", _ODD,
     _LARGE),
    ("codes of the first step", "load_codes(codes, stage, step)", "load_codes(codes, stage, 0)",
     _ONE),
    ("rows of codes taken as dense", "kBytes ? code_stride : chunks", "kBytes ? inputs : chunks",
     _STRIDED),
    ("no more columns of scales than chunks", "kBytes ? scale_columns", "kBytes ? chunks",
     _STRIDED),
    ("scales of each output where 128 share them", "kBytes ? outputs_log2 : 0", "0", _ODD),
    ("scales of 128 outputs for those of each", "kBytes ? outputs_log2 : 0", "7", _STRIDED),
    ("rows of scales of an expert rounded down", "((outputs - 1 >> shared_log2) + 1)",
     "(outputs >> shared_log2)", _EXPERTS),
    ("scales of the first 128 outputs", "(of_scales + (first >> shared_log2))", "of_scales", _ODD),
    ("the scale of all inputs forgotten", "GROUP > 0 ? own : mul_rn(own, scale)", "own", _ONE,
     _ALL),
    ("the scale of int8 forgotten", "GROUP > 0 ? own : mul_rn(own, scale)", "own", _ONE, _I8),
]  # fmt: skip
_BYTES_IN_WEIGHTS = [
    ("codes behind the end of a row", "chunk * kRowBytes + piece * 16 >= row_bytes", "false",
     _STRIDED),
    ("the last codes of a row left out", "piece * 16 >= row_bytes", "piece * 16 + 16 >= row_bytes",
     _ODD),
    ("codes behind the last output", "ends ? 0 : left - row", "ends ? 0 : kOutputs", _STRIDED),
    ("halves of a row stored in their order", "to + place(row + i, piece)",
     "to + (row + i) * kRowBytes + piece * 16", _ONE),
    ("four codes for eight", "unpack_e4m3<T>(from[2 * j + 1]", "unpack_e4m3<T>(from[2 * j]", _ONE),
    ("four codes of int8 for eight", "unpack_int8<T>(from[2 * j + 1]", "unpack_int8<T>(from[2 * j]",
     _ONE, _I8),
    ("the first eight codes for all", "(from[2 * j], to", "(from[0], to", _ONE, _ALL),
    ("pairs of int8 in another order", "unpack_int8<T>(from[2 * j], to[0], to[1])",
     "unpack_int8<T>(from[2 * j], to[1], to[0])", _ONE, _I8),
]  # fmt: skip
_BYTES_IN_ROWS = [
    ("pieces of x stored in their order", "to + place(row + i, piece)",
     "to + (row + i) * kPitch + piece * 16", _STRIDED),
]  # fmt: skip

_EARLY = [
    (chained, "no wait for the kernel ahead", "    pdl_wait();\n    pdl_launch",
     "    pdl_launch"),
    (chained, "x read before the wait", "    pdl_wait();\n    pdl_launch",
     "    if (x[run.first * x_stride].bits == 1) return;\n    pdl_wait();\n    pdl_launch"),
    (sorted_ahead, "the ends of experts read before the wait", "  if (ends) pdl_wait();\n", ""),
]  # fmt: skip

# What only a block that multiplies several slices does, and another order of sums.
_WHOLE = [
    (_ALL, "the last slice alone", "first ? y : add_rn(sum, y)", "y"),
    (_ALL, "the sums of a slice in the next", "        own = 0;\n", ""),
    (_ALL, "sums that are not cleared at first", "first ? y : add_rn(sum, y)", "add_rn(sum, y)"),
    ({"weight": "E4M3"}, "the last slice alone of 8 bits", "first ? y : add_rn(sum, y)", "y"),
    ({}, "one slice", "c + 1 == chunks * (slice + 1) >> slices_log2", "c + 1 == end"),
    ({}, "the order of slices depends on the rows", "        Floats4 y = at.add",
     "        if (rows > 1) of_row[i] = {of_row[i].y[0], of_row[i].y[2], of_row[i].y[1],\n"
     "                                   of_row[i].y[3]};\n        Floats4 y = at.add"),
]  # fmt: skip


def _fault(name, old, new, sizes, *more):
    """Arguments of Fault; ``more``: values of the variant, or further arguments."""
    fault = {"kernel": "quantized_gemm", "name": name, "old": old, "new": new, "sizes": sizes}
    needs = {"scalar_t": "kiln::bf16", "weight": "U4", "group": "128", "tile_rows": "32"}
    for one in more:
        (needs if one.keys() <= QUANTIZED_GEMM.params.keys() else fault).update(one)
    return {**fault, "needs": needs}


def _of_bytes(name, old, new, sizes, *more):
    """The same, of 8-bit codes."""
    return _fault(f"8 bits, {name}", old, new, sizes, {"weight": "E4M3"}, *more)


FAULTS = [
    *(_fault(*fault) for fault in (*_PLACES, *_RING, *_MULTIPLY, *_FINISH)),
    *(_fault(*fault, _WEIGHTS) for fault in _IN_WEIGHTS),
    *(_fault(*fault, _ROWS) for fault in _IN_ROWS),
    *(_fault(*fault, _CODES) for fault in _IN_CODES),
    *(_of_bytes(*fault) for fault in _OF_BYTES),
    *(_of_bytes(*fault, _WEIGHTS) for fault in _BYTES_IN_WEIGHTS),
    *(_of_bytes(*fault, _ROWS) for fault in _BYTES_IN_ROWS),
    *(_fault(*fault, None, {"scenario": scenario}) for scenario, *fault in _EARLY),
    *(
        _fault(*fault, None, {"scenario": partial(whole, needs={"group": "128", **needs})})
        for needs, *fault in _WHOLE
    ),
]
