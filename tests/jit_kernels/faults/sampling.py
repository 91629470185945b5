"""Faults planted in the sampler; see test_faults.py."""

DRAW, ROW, LIKELY = "kiln/draw.cuh", "kiln/vocabulary.cuh", "kiln/likely.cuh"
LIST, RACE, SURVEY = "kiln/shortlist.cuh", "kiln/race.cuh", "kiln/survey.cuh"
MASS = "kiln/mass.cuh"

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
        LIST,
        "s.total = 0;\n    __syncthreads();\n    auto",
        "s.total = 0;\n    auto",
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
    ("counts without atomics", LIST, "atomicAdd(&s.count[b], 1u);", "s.count[b] += 1;"),
    ("a carry lost", LIST, "uint32_t(own >> 32) + (old + low < old)", "uint32_t(own >> 32)"),
    ("a mass as a float", DRAW, "mul_rn(weight, 0x1p40f)", "mul_rn(weight, 0x1p20f)"),
    ("top-k counts one more", "", "limits{uint32_t(want.top_k),", "limits{want.top_k + 1u,"),
    (
        "top-p of the row where top-k left less",
        "",
        "all.mass = s.kept;",
        "all.mass = s.total;",
    ),
    (
        "the list is too short and nobody looks",
        "",
        "in_list && !complete && s.total < low",
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
        LIST,
        "mass += (uint64_t(weights",
        "mass = 0 * (uint64_t(weights",
    ),
    (
        "a unit of the list counted with each of its tokens",
        LIST,
        "if ((listed & (2 * own - 1)) != own) return;",
        "",
    ),
    ("parts of a sum that overflow", MASS, "kPart = 26", "kPart = 30"),
    ("the next key taken for the same", "", "if (key_of(x) < key)", "if (key_of(x) <= key)"),
    (
        "edited tokens counted with the list and the rest",
        "",
        "x < value_of(s.bound) ? own",
        "true ? own",
    ),
    ("the total of the last digits", LIST, "max(s.total, mass + m)", "mass + m"),
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
        "(own - base) >> shift], 1u);\n    __syncthreads();",
        "(own - base) >> shift], 1u);",
    ),
    ("a bound of the keys next to the largest alone", LIST, "(enough || shift < 16)", "true"),
    ("counts of the warps after added too", LIST, "lane < int(threadIdx.x) / 32", "lane < 16"),
    (
        "edits left out of the race",
        RACE,
        "  row.each_edit([&](int edited, float x) { race.run(edited, x, s); });\n",
        "",
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
