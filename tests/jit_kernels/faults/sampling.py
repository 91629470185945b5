"""Faults planted in the sampler; see test_faults.py."""

DRAW, ROW, LIKELY = "kiln/draw.cuh", "kiln/vocabulary.cuh", "kiln/likely.cuh"
LIST, RACE, SURVEY = "kiln/shortlist.cuh", "kiln/race.cuh", "kiln/survey.cuh"
MASS, CUT, BINS = "kiln/mass.cuh", "kiln/cut.cuh", "kiln/bins.cuh"

# name, header (empty: the template), what is replaced, by what
_PLANTED = [
    (
        "dropped barrier before partial results are read",
        MASS,
        "/ 32] = x;\n  __syncthreads();",
        "/ 32] = x;",
    ),
    (
        "dropped barrier before the units near the bound are read",
        LIST,
        "token, x);\n  });\n  __syncthreads();\n  const int queued",
        "token, x);\n  });\n  const int queued",
    ),
    (
        "dropped barrier before the list is sorted",
        LIKELY,
        "s.some[slot] = s.list[j];\n  }\n  __syncthreads();",
        "s.some[slot] = s.list[j];\n  }",
    ),
    (
        "dropped barrier before a histogram",
        CUT,
        "s.bins = bins;\n    __syncthreads();",
        "s.bins = bins;",
    ),
    (
        "dropped barrier before low numbers run",
        "",
        "find_lows(noise, row.vocab, s);\n      __syncthreads();",
        "find_lows(noise, row.vocab, s);",
    ),
    (
        "dropped barrier before the hidden are marked",
        "",
        ": ~row.allowed[w];\n  __syncthreads();",
        ": ~row.allowed[w];",
    ),
    (
        "counts without atomics",
        LIST,
        "atomicAdd(&bucket, uint32_t(blockDim.x != 0));",
        "bucket += 1;",
    ),
    ("a carry lost", CUT, "uint32_t(mass >> 32) + (old + low < old)", "uint32_t(mass >> 32)"),
    ("a mass as a float", DRAW, "mul_rn(weight, 0x1p40f)", "mul_rn(weight, 0x1p20f)"),
    ("top-k counts one more", "", "limits{uint32_t(want.top_k),", "limits{want.top_k + 1u,"),
    (
        "top-p of the row where top-k left less",
        "",
        "all.mass = s.kept;",
        "all.mass = row_mass;",
    ),
    (
        "the list is too short and nobody looks",
        "",
        "in_list && !complete && s.kept < low",
        "false",
    ),
    (
        "a mass that is nearly known taken for exact",
        "",
        "all = {sum_of_row(row, peaks, weights, s), 0};",
        "return max(least, found);",
    ),
    (
        "the rest of the row taken for exact",
        "",
        "(mass >> kFastBits) + uint64_t(vocab)",
        "0",
    ),
    (
        "what is listed counted twice",
        CUT,
        "sums.a += (uint64_t(unit",
        "sums.a = 0 * (uint64_t(unit",
    ),
    (
        "a unit of the list counted with each of its tokens",
        CUT,
        "if ((listed & (2 * own - 1)) != own) continue;",
        "",
    ),
    ("parts of a sum that overflow", MASS, "kPart = 26", "kPart = 30"),
    (
        "the next key taken for the same",
        "",
        "(s.list[j] >> 32) < key)",
        "(s.list[j] >> 32) <= key)",
    ),
    (
        "edited tokens counted with the list and the rest",
        "",
        "x < value_of(s.bound) ? own",
        "true ? own",
    ),
    (
        "buckets below zero from the wrong end",
        BINS,
        "((lower - key) >> shift)",
        "((key - first) >> shift)",
    ),
    (
        "what lies beyond a window begins anew",
        CUT,
        "count = s.kept_count, mass = s.kept,",
        "count = 0, mass = 0,",
    ),
    ("numbers close to zero taken for one", CUT, "if (b == bins.middle) continue;", ""),
    (
        "a cut close to zero taken for found",
        CUT,
        "first = max(first, bins.lower + 1), last = bins.upper - 1;\n      continue;",
        "first = bins.upper;\n      break;",
    ),
    (
        "edits beside a row without mass",
        CUT,
        "tally(bins, key_of(x), last, weights, true, s)",
        "tally(bins, key_of(x), last, weights, false, s)",
    ),
    (
        "edits taken for their bucket's number",
        CUT,
        "end = kFree && !edited ? kFree : 0;",
        "end = kFree;",
    ),
    (
        "a unit's logits in each other's place",
        ROW,
        "select(k & N / 2, x[i], x[i + N / 2])",
        "select(k & N / 2, x[i + N / 2], x[i])",
    ),
    (
        "a fast power of another scale",
        MASS,
        "(x[k], scale, -whole)",
        "(x[k], 0.9f * scale, -whole)",
    ),
    ("a block of exponents left out", MASS, "if (own + 1 == block) middle += shifted;", ""),
    ("the list overflows", LIST, "if (slot < kCandidates) s.list[slot]", "s.list[slot]"),
    (
        "min-p ignored",
        "",
        "cutoff = fmaxf(cutoff, add_rn(top,",
        "cutoff = fminf(cutoff, add_rn(top,",
    ),
    (
        "noise keyed by the row",
        "",
        "Noise::of(want.plan.seed,",
        "Noise::of(want.plan.seed + blockIdx.x,",
    ),
    ("a low number that is not", DRAW, "low ? own >> 20 :", "low ? own >> 12 :"),
    ("numbers that are not low pressed to one", DRAW, "(own >> 12) * 255 >> 8", "(own >> 12) >> 8"),
    (
        "low numbers behind the first left out",
        DRAW,
        "(low & ~1u << first) | 1u << first",
        "1u << first",
    ),
    ("a byte for another token", DRAW, "<< 8 * i;", "<< (8 * i ^ 8);"),
    ("a wrong logarithm", DRAW, "0.69314718f", "0.4f"),
    ("a winner passed over", RACE, "least = -8.0f -", "least = 2.0f -"),
    ("what top-p leaves cut", "", "- 41.0f)", "- 33.0f)"),
    ("groups with a low number passed over", RACE, "> kNoneLow;", ">= 0xf8000000u;"),
    (
        "the first low number taken for the one before",
        DRAW,
        "none_low[token % kGroup]) return true",
        "none_low[token % kGroup]) return false",
    ),
    ("a low number's byte for another token", DRAW, ">> token % 8 & 1", ">> (token + 1) % 8 & 1"),
    (
        "dropped barrier before a bound's histogram is read",
        LIST,
        "count_in(s.count[(own - base) >> shift]);\n    __syncthreads();",
        "count_in(s.count[(own - base) >> shift]);",
    ),
    ("a bound of the keys next to the largest alone", LIST, "(enough || shift < 16)", "true"),
    ("counts of the warps after added too", LIST, "lane < int(threadIdx.x) / 32", "lane < 16"),
    (
        "edits left out of the race",
        RACE,
        "first = visit(row, peaks, true, race, s);",
        "first = ~uint64_t(0);",
    ),
    ("the first pass sees the hidden", SURVEY, "if (hides || u >= whole)", "if (u >= whole)"),
    ("a sum of the hidden too", ROW, "u < num_whole_units(), hides(u)", "u < num_whole_units(), 0"),
    ("mask ignored by edited tokens", ROW, "out = allowed != nullptr &&", "out = false &&"),
    ("edited tokens drawn twice", "", "1u << row.edits.tokens[e] % 32);", "0u);"),
    (
        "repetition penalty of a negative logit",
        ROW,
        "mul_rn(x, edits.repetition)",
        "div_rn(x, edits.repetition)",
    ),
    ("dropped last tokens", ROW, "return (vocab + kUnit - 1) / kUnit;", "return vocab / kUnit;"),
    (
        "vectors past the row",
        ROW,
        "return aligned ? vocab / kUnit : 0;",
        "return aligned ? num_units() : 0;",
    ),
    ("rows taken as dense", "", "logits + r * stride", "logits + r * vocab"),
    (
        "greedy takes the highest of equals",
        SURVEY,
        "for (int k = kUnit - 1; k >= 0; --k) place =",
        "for (int k = 0; k < kUnit; ++k) place =",
    ),
    ("rank counts equals", "", "value_of_entry(s.list[j]) > x", "value_of_entry(s.list[j]) >= x"),
]

FAULTS = [
    {
        "kernel": "sample_tokens",
        "name": name,
        "header": header,
        "old": old,
        "new": new,
        "needs": {"logits_t": "kiln::bf16"},
    }
    for name, header, old, new in _PLANTED
]
