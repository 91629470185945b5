"""Faults planted in the sampler; see test_faults.py."""

DRAW, ROW = "kiln/draw.cuh", "kiln/vocabulary.cuh"
LIST, RACE = "kiln/shortlist.cuh", "kiln/race.cuh"

# name, header (empty: the template), what is replaced, by what
_PLANTED = [
    (
        "dropped barrier before partial results are read",
        LIST,
        "/ 32] = x;\n  __syncthreads();",
        "/ 32] = x;",
    ),
    (
        "dropped barrier after partial results were read",
        LIST,
        "__syncthreads();  // earlier readers of partial are done",
        "",
    ),
    (
        "dropped barrier before ranks are counted",
        LIST,
        "s.rank[c] = 0;\n  __syncthreads();",
        "s.rank[c] = 0;",
    ),
    (
        "dropped barrier before the list is sorted",
        LIST,
        "atomicAdd(&s.rank[c], larger);\n  }\n  __syncthreads();",
        "atomicAdd(&s.rank[c], larger);\n  }",
    ),
    (
        "ranks counted without atomics",
        LIST,
        "atomicAdd(&s.rank[c], larger);",
        "s.rank[c] += larger;",
    ),
    (
        "dropped barrier before masses are added up",
        LIST,
        "weights.mass(value_of_entry(s.sorted[j]));\n  __syncthreads();",
        "weights.mass(value_of_entry(s.sorted[j]));",
    ),
    (
        "dropped barrier before a histogram",
        LIST,
        "= s.high[b] = 0;\n    __syncthreads();",
        "= s.high[b] = 0;",
    ),
    (
        "dropped barrier after a histogram",
        LIST,
        "row.each_token(tally);\n    __syncthreads();",
        "row.each_token(tally);",
    ),
    (
        "dropped barrier before a bucket is read",
        LIST,
        "s.mass = m;\n    }\n    __syncthreads();",
        "s.mass = m;\n    }",
    ),
    ("counts without atomics", LIST, "atomicAdd(&s.count[b], 1u);", "s.count[b] += 1;"),
    ("a carry lost", LIST, "uint32_t(own >> 32) + (old + low < old)", "uint32_t(own >> 32)"),
    ("a mass as a float", DRAW, "mul_rn(weight, 0x1p40f)", "mul_rn(weight, 0x1p20f)"),
    ("a share rounded up", LIST, "return share ? share : 1;", "return share + mass / 64 + 1;"),
    ("top-k counts one more", "", "s.sorted[want.top_k - 1]", "s.sorted[want.top_k]"),
    (
        "top-k counts one more in the descent",
        "",
        "weights, want.top_k, kUnlimited",
        "weights, want.top_k + 1, kUnlimited",
    ),
    ("top-p keeps one less", "", "s.sorted[nucleus - 1]", "s.sorted[max(nucleus - 2, 0)]"),
    (
        "top-p of the row where top-k left less",
        "",
        "want.cuts_count ? mass : s.drawn_mass",
        "s.drawn_mass + mass - mass",
    ),
    (
        "the descent takes keys above its prefix",
        LIST,
        "|| (from < 32 && (key ^ prefix) >> from)",
        "",
    ),
    ("the descent ends too early", LIST, "rounded ? 13 : 0", "rounded ? 17 : 4"),
    (
        "the list is too short and nobody looks",
        "",
        "known = complete || want.cuts_count || mass >= limit;",
        "known = true;",
    ),
    ("the list overflows", "", "if (slot < kCandidates) s.list", "s.list"),
    (
        "min-p ignored",
        "",
        "cutoff = fmaxf(cutoff, add_rn(top,",
        "cutoff = fminf(cutoff, add_rn(top,",
    ),
    (
        "noise keyed by the row",
        "",
        "want, keys[0], keys[1], best",
        "want, keys[0] + r, keys[1], best",
    ),
    ("noise without the position", DRAW, "uint64_t(position) +", ""),
    (
        "four tokens with the same upper bits",
        DRAW,
        "upper(token / 4) >> 16 * (token % 4)",
        "upper(token / 4)",
    ),
    (
        "the lower bits run into the upper",
        DRAW,
        "uint64_t(token + 1)) >> 28;",
        "uint64_t(token + 1)) >> 12;",
    ),
    ("a wrong logarithm", DRAW, "0.69314718f", "0.4f"),
    ("a winner passed over", RACE, "int((as_uint(may) - 1) >> 23) - 126", "0"),
    ("a bound too tight", RACE, "kSlack * float(upper + 1) /", "0.1f * float(upper) /"),
    ("the cutoff ignored in the race of a row", RACE, "if (!(x >= cutoff)) return;", ""),
    ("the cutoff ignored in the race of a list", RACE, "if (x >= cutoff)\n", "if (true)\n"),
    ("edits left out of the race", RACE, "  row.each_edit(run);\n", ""),
    ("mask ignored by edited tokens", ROW, "if (allowed != nullptr &&", "if (false &&"),
    ("edited tokens drawn twice", "", "1u << edits.tokens[e] % 32);", "0u);"),
    (
        "dropped barrier before the hidden are marked",
        "",
        ": ~allowed[w];\n    __syncthreads();",
        ": ~allowed[w];",
    ),
    (
        "marks without atomics",
        "",
        "atomicOr(&hidden[edits.tokens[e] / 32], 1u <<",
        "hidden[edits.tokens[e] / 32] |= (1u <<",
    ),
    (
        "repetition penalty of a negative logit",
        ROW,
        "mul_rn(x, edits.repetition)",
        "div_rn(x, edits.repetition)",
    ),
    ("a bias left out", ROW, "  x = add_rn(x, edits.biases[e]);\n", ""),
    ("frequency counted once", ROW, "mul_rn(edits.frequency, float(count))", "edits.frequency"),
    ("presence of a prompt", ROW, "if (count > 0) x = sub_rn", "if (count >= 0) x = sub_rn"),
    ("dropped last tokens", ROW, "return (vocab + kUnit - 1) / kUnit;", "return vocab / kUnit;"),
    ("misaligned vectors", ROW, "return aligned ? vocab / kUnit : 0;", "return vocab / kUnit;"),
    (
        "vectors past the row",
        ROW,
        "return aligned ? vocab / kUnit : 0;",
        "return aligned ? num_units() : 0;",
    ),
    ("rows taken as dense", "", "logits + r * stride", "logits + r * vocab"),
    (
        "greedy takes the highest of equals",
        "",
        "for (int k = kUnit - 1; k >= 0; --k) token =",
        "for (int k = 0; k < kUnit; ++k) token =",
    ),
    ("log-probabilities of the edited row", "", "gather(raw, raw_best", "gather(row, raw_best"),
    (
        "log-probabilities at the temperature",
        "",
        "shared ? kLog2e : 0.0f",
        "shared ? weights.scale : 0.0f",
    ),
    (
        "rank counts equals",
        "",
        "value_of_entry(s.sorted[j]) > x",
        "value_of_entry(s.sorted[j]) >= x",
    ),
    (
        "one likely token too many",
        "",
        "const bool there = j < num_top",
        "const bool there = j <= num_top",
    ),
]

FAULTS = [
    {"kernel": "sample_tokens", "name": name, "header": header, "old": old, "new": new}
    for name, header, old, new in _PLANTED
]
