"""Faults planted in the product of a few rows: 4-bit codes, their groups, and rows of experts."""

from functools import partial

from skinny_experts import exact, of_experts, sorted_ahead
from skinny_products import planted

from kiln.jit_kernels.ops.linear.cases import SIZES

_GROUPS, _PIECES, _LIFT, _EXACT, _RUNS = (
    {"header": f"{folder}/{name}.cuh"}
    for folder, name in (
        *(("linear", name) for name in ("groups", "four_bits")),
        *(("kiln/math", name) for name in ("four_bits", "exact")),
        ("linear", "experts"),
    )
)
_HALVES, _BLOCKS, _ALL = ({"scaled": one} for one in ("kBy64", "kByBlock", "kByOutput"))
_TWO_TILES, _E2M1, _FP16 = {"tiles": "2"}, {"weight": "E2M1"}, {"scalar_t": "kiln::fp16"}

# The cases of cases.py, by what they have: half a chunk; 10 chunks, zero points and a bias; 33
# chunks, so that some warps have 3; zero points, and a last chunk that is not full; one that is not
# used here; more outputs than the blocks of a grid compute at once; a single vector.
_ONE, _STRIDED, _LONG, _ODD, _, _MANY, _SHORT = ([one] for one in SIZES[:7])

_WALKS = [
    ("one chunk of codes behind the end of a row", "wanted = k < inputs", "wanted = k <= inputs",
     _MANY),
    ("codes that go on by bytes for codes", "low += kFourBits ? step / 2 : step", "low += step",
     _LONG),
    ("a byte for each code at first", "(kFourBits ? 2 : 1);", "1;", _ONE),
    ("the first 16 bytes of a chunk for all lanes", "(begin + lane % 4 * WEIGHT::kElements)",
     "(begin)", _ONE),
    ("lanes count inputs as with other codes", "(kFourBits ? 0 : at - begin)",
     "lane % 4 * WEIGHT::kElements", _ONE),
    ("codes g for those of g + 8", "load_early_if(wanted, chunk.high.w, high)",
     "load_early_if(wanted, chunk.high.w, low)", _ONE),
    ("codes of the chunks ahead not loaded", "load_early_if(wanted, chunk.low.w, low)",
     "load_early_if(wanted && k < kStep, chunk.low.w, low)", _LONG),
    ("the first 32 codes of a lane for all", "from.w[p]", "from.w[0]", _ONE, _PIECES),
    ("the same word of codes in both windows", "piece = v * kOfVector + i", "piece = i", _STRIDED),
    ("x of the first window in both", "(c + a) * kChunk, v, inputs", "(c + a) * kChunk, 0, inputs",
     _LONG),
    ("half of each chunk left out", "v += kWindow)", "v += 2 * kWindow)", _STRIDED),
    ("vectors of x side by side", "kStep = kFourBits ? 32 :", "kStep = kFourBits ? 8 :", _ONE),
    ("lanes of x at the distance of codes", "(kFourBits ? 8 : WEIGHT::kElements)",
     "WEIGHT::kElements", _LONG),
    ("x behind the end of a row", "k + w * kStep, inputs", "k, inputs", _ODD),
    ("lanes that stop at the end of x", "k - own_x + begin < inputs", "k < inputs", _SHORT),
]  # fmt: skip

_SCALES = [
    ("groups of the first chunk", "SCALED > 1 ? begin / SCALED : 0", "0", _STRIDED),
    ("groups of inputs with one for each output", "SCALED > 1 ? begin / SCALED : 0",
     "begin / SCALED", _STRIDED, _ALL),
    ("groups that go on with one for each output", "if constexpr (kFourBits && SCALED > 1) {\n"
     "      of_low", "if constexpr (kFourBits) {\n      of_low", _LONG, _ALL),
    ("groups that do not go on", "      of_low += step / SCALED;\n", "", _LONG),
    ("groups of the outputs g for g + 8", "of_expert + high * scale_columns",
     "of_expert + low * scale_columns", _STRIDED),
    ("scales of the first group of a chunk", ".scale(g)", ".scale(0)", _STRIDED),
    ("e2m1 scales of the first group", ".scale(g)", ".scale(0)", _STRIDED, _E2M1),
    ("scales of the outputs g for g + 8", "(j < 2 ? chunk.of_low : chunk.of_high)", "chunk.of_low",
     _STRIDED),
    ("scales of the group behind", "g = piece * kGroups / kPieces",
     "g = (piece + 1) * kGroups / kPieces % kGroups", _STRIDED),
    ("groups added after their first piece", "(piece + 1) * kGroups % kPieces == 0",
     "piece * kGroups % kPieces == 0", _STRIDED, _HALVES),
    ("the sums of a group in the next", "        sum[j] = 0;\n", "", _STRIDED),
    ("the last group alone", "fma_rn(sum[j], (j < 2 ? chunk.of_low : chunk.of_high).scale(g), "
     "total[j])", "mul_rn(sum[j], (j < 2 ? chunk.of_low : chunk.of_high).scale(g))", _STRIDED),
    ("the first scales for all", "from + at", "from", _STRIDED, _GROUPS),
    ("e2m1 scales of the first for all", "from + at", "from", _STRIDED, _GROUPS, _E2M1),
    ("e2m1 scales in another order", ">> 8 * n & 0xff", ">> 8 * (3 - n) & 0xff", _ONE, _GROUPS,
     _E2M1),
    ("sums of codes that are not lifted again", "mul_rn(total[s][n][j], WEIGHT::restore<T>())",
     "total[s][n][j]", _ONE),
    ("fp16 lifted again as bf16", "kUnlift<fp16> = 512", "kUnlift<fp16> = 64", _ONE, _LIFT, _FP16),
]  # fmt: skip

_ZEROS = [
    ("zero points ignored", "wanted && zeros", "false", _STRIDED, _GROUPS),
    ("zero points that are not given", "wanted && zeros", "wanted", _ONE, _GROUPS),
    ("another zero point if none is given", "zero[n] = 8;", "zero[n] = 7;", _ONE, _GROUPS),
    ("zero points of the first group loaded", "zeros + at + n", "zeros + at", _STRIDED, _GROUPS),
    ("zero points of the first group of a chunk", "zero_pair<T>(g)", "zero_pair<T>(0)", _STRIDED),
    ("zero points of the outputs g for g + 8", "chunk.of_high.zero_pair", "chunk.of_low.zero_pair",
     _STRIDED, _BLOCKS),
    ("the zero point 16 taken as 0", "uint32_t(zero)", "uint32_t(zero & 15)", _STRIDED, _LIFT),
]  # fmt: skip

_IN_E2M1 = [
    ("the sign of even codes lost", "(top & 0x80008000)", "(top & 0x80000000)"),
    ("the fraction of odd codes lost", "0x70007000", "0x60007000"),
    ("pairs of codes below 1 taken as 0", "(top & 0x70007000) >>",
     "(top & (top & 0x60006000 ? 0x70007000 : 0)) >>"),
    ("a smaller lift", "0x7e807e80", "0x7e007e00"),
]  # fmt: skip

# What only an exact comparison shows.
_IN_EXACT = [
    ("a scale of 2^-127 taken as 0", "exponent ? exponent << 23 : 1u << 22", "exponent << 23",
     _EXACT, _E2M1),
    ("a scale of 2^-127 taken as 2^-126", ": 1u << 22", ": 1u << 23", _EXACT, _E2M1),
]  # fmt: skip

# Blocks that go on to further outputs.
_FURTHER = [
    ("blocks that do not go on", "first += gridDim.x * kOutputs, buffer",
     "first += outputs, buffer"),
    ("the first chunks of further outputs not loaded", "< outputs) start(first",
     "< 0) start(first"),
    ("the first chunks of the next block's outputs", "start(first + gridDim.x * kOutputs)",
     "start(first + kOutputs)"),
    ("total sums that go on", "sum[s][n][j] = total[s][n][j] = 0;", "sum[s][n][j] = 0;"),
    ("one buffer of sums without a barrier behind", "kBuffers - 1 - buffer", "buffer",
     {"seeds": 3}),
    ("one buffer of sums with two tiles, without a barrier behind",
     "if constexpr (kBuffers == 1) __syncthreads();", "", _TWO_TILES, {"seeds": 3}),
    ("sums read from the first buffer", "sums[buffer][w]", "sums[0][w]"),
    ("the scales of a block's first outputs",
     "low = own(first + s * kOfSet, 0), high = own(first + s * kOfSet, 8)",
     "low = own(blockIdx.x * kOutputs, 0), high = own(blockIdx.x * kOutputs, 8)", _ALL),
    ("the bias of a block's first outputs", "* outputs + n])",
     "* outputs + blockIdx.x * kOutputs + column])"),
    ("the first outputs written again", "n = first + column", "n = blockIdx.x * kOutputs + column"),
]  # fmt: skip

_IN_EXPERTS = [
    ("blocks without a run go on", "    if (run.count == 0) return;\n", ""),
    ("the first run in every block", "block = blockIdx.y", "block = 0", _RUNS),
    ("runs of one tile where there are two", "run_of_block<8 * TILES>", "run_of_block<8>",
     _TWO_TILES),
    ("the first rows of x", "run.first + min(n * 8", "min(n * 8"),
    ("results in the first rows", "(run.first + m) * out_stride", "m * out_stride"),
    ("rows of the next expert written", "m < run.count &&", "m < rows - run.first &&"),
    ("the last row of a run left out", "m < run.count &&", "m < run.count - 1 &&"),
    ("weights of the first expert", "run.expert * expert_weights", "0"),
    ("weights of experts taken as dense", "run.expert * expert_weights",
     "run.expert * int64_t(outputs) * inputs", {"weight": "Plain", "scaled": "kNone"}),
    ("groups of the first expert", "run.expert * expert_scales + g", "g"),
    ("scales of all inputs of the first expert", "of_expert = run.expert * expert_scales;",
     "of_expert = 0;", _ALL),
    ("scales of blocks of the first expert", "of_expert = run.expert * expert_scales;",
     "of_expert = 0;", {"weight": "E4M3", "input": "E4M3"}, _BLOCKS),
    ("scales of the first rows of x", "(run.first + m) * row", "m * row",
     {"weight": "E4M3", "input": "E4M3"}, _ALL),
    ("the bias of the first expert", "int64_t(run.expert) * outputs + n", "n"),
    ("the bias of experts at another distance", "int64_t(run.expert) * outputs + n",
     "run.expert * out_stride + n"),
    ("runs of two tiles where there is one", "run_of_block<8 * TILES>", "run_of_block<16>"),
    ("the end before expert 0 read", "return expert ? ends[expert - 1] : 0;",
     "return ends[expert - 1];", _RUNS),
    ("experts begin where they end", "return expert ? ends[expert - 1]",
     "return expert ? ends[expert]", _RUNS),
    ("a block for each row only", "firsts = min(rows, num_experts)", "firsts = rows", _RUNS),
    ("a block for each expert only", "firsts = min(rows, num_experts)", "firsts = num_experts",
     _RUNS),
    ("rows up to the end of the first expert", "last = ends[num_experts - 1]", "last = ends[0]",
     _RUNS),
    ("experts of fewer rows by row", " && rows >= num_experts", "", _RUNS),
    ("rows of other experts after those of one", "min(ends[block] - begin, kRows)", "kRows", _RUNS),
    ("rows of a run behind a tile written as well", "min(ends[block] - begin, kRows)",
     "ends[block] - begin", _RUNS),
    ("every row begins a run", "block < last && begin_of(expert) == block", "block < last", _RUNS),
    ("rows of other experts after the first one", "min(ends[expert] - block, kRows)", "kRows",
     _RUNS),
    ("further runs looked for in the first rows", "(block - firsts + 1) * kRows",
     "(block - firsts) * kRows", _RUNS),
    ("the first row of a block alone may begin a run", "threadIdx.x % kRows;", "0;", _RUNS),
    ("experts of rows behind the last end read", "own < last ? experts[own]", "true ? experts[own]",
     _RUNS),
    ("further runs that begin with an expert", "place > 0 && ", "", _RUNS),
    ("further runs anywhere", " && place % kRows == 0", "", _RUNS),
    ("the first row of a block for that of a run", "__shfl_sync(0xffffffffu, own, from)",
     "__shfl_sync(0xffffffffu, own, 0)", _RUNS),
    ("further runs that go on to the next expert", "min(ends[its] - first, kRows)", "kRows", _RUNS),
]  # fmt: skip


def _codes(name, old, new, *more):
    """A fault in the product with 4-bit codes in groups of 32, unless ``more`` has others."""
    return planted("kBy32", name, old, new, {"weight": "U4"}, *more)


def _with(scenario, name, old, new, *more):
    """A fault that a scenario shows."""
    fault = _codes(name, old, new, *more)
    return fault | {"scenario": partial(scenario, needs=fault["needs"])}


FAULTS = [
    *(_codes(*fault) for fault in (*_WALKS, *_SCALES, *_ZEROS)),
    *(_codes(*fault, _ONE, _LIFT, _E2M1) for fault in _IN_E2M1),
    *(_with(exact, *fault) for fault in _IN_EXACT),
    *(_codes(*fault, _MANY) for fault in _FURTHER),
    *(_with(of_experts, *fault, {"experts": "true"}) for fault in _IN_EXPERTS),
    _codes("experts read before the wait", "  if constexpr (EXPERTS) {\n    pdl_wait();\n",
           "  if constexpr (EXPERTS) {\n", {"scenario": sorted_ahead}, {"experts": "true"}),
]  # fmt: skip
