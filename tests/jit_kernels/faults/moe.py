"""Faults planted in the MoE kernels; see test_faults.py."""

_ROUTE = {"kernel": "route_tokens", "needs": {"router_t": "kiln::bf16", "max_experts": "256"}}
_ALIGN = {"kernel": "align_tokens"}
_512 = {"needs": {"router_t": "float", "max_experts": "512"}}

FAULTS = [
    _ROUTE | {
        "name": "a NaN taken for the largest number",
        "old": "return x == x ? fminf(x, kLargest) : kiln::minus_infinity();",
        "new": "return fminf(x, kLargest);",
    },
    _ROUTE | {
        "name": "infinity divided by infinity",
        "old": "x == x ? fminf(x, kLargest) : ",
        "new": "x == x ? x : ",
    },
    _ROUTE | {
        "name": "the zeros not equal",
        "old": "comparable(kiln::add_rn(own, more))",
        "new": "comparable(bias ? kiln::add_rn(own, more) : own)",
    },
    _ROUTE | {
        "name": "ties of a lane to the higher id",
        "old": "for (int i = kPerLane - 1; i >= 0; --i) at",
        "new": "for (int i = 0; i < kPerLane; ++i) at",
    },
    _ROUTE | {
        "name": "ties of lanes to the higher id",
        "old": "__ffs(__ballot_sync(kAll, best == most)) - 1",
        "new": "31 - __clz(__ballot_sync(kAll, best == most))",
    },
    _ROUTE | {
        "name": "an expert chosen twice",
        "old": "key[i] = i == at ? kTaken : key[i];",
        "new": "{}",
    },
    _ROUTE | {
        "name": "groups always ranked by two",
        "old": "by_largest ? 0.0f : two.second",
        "new": "two.second",
    },
    _ROUTE | {
        "name": "groups always ranked by one",
        "old": "by_largest ? 0.0f : two.second",
        "new": "0.0f",
    },
    _ROUTE | {
        "name": "the least sum forgotten",
        "old": "fmaxf(kiln::add_rn(sum, 1e-20f), least_sum)",
        "new": "kiln::add_rn(sum, 1e-20f)",
    },
    _ROUTE | {
        "name": "half of the warp not compared",
        "old": "int m = 16; m; m >>= 1",
        "new": "int m = 8; m; m >>= 1",
        "header": "kiln/ptx/warp.cuh",
    },
    _ROUTE | {
        "name": "the second of a group forgotten between lanes",
        "old": "second = fmaxf(second, __shfl_xor_sync(kAll, second, m));",
        "new": "",
    },
    _ROUTE | {
        "name": "the second of a group forgotten inside a lane",
        "old": "second = fmaxf(second, fminf(first, x));",
        "new": "",
    } | _512,
    _ROUTE | {
        "name": "groups of whole lanes, half of whose lanes are left out",
        "old": "m < (lanes ? lanes : 32); m *= 2",
        "new": "m < (lanes ? lanes / 2 : 32); m *= 2",
    },
    _ROUTE | {
        "name": "the neighbour of a group that no lane has to itself",
        "old": "if (expert == next) ++group",
        "new": "if (expert == next + 1) ++group",
    },
    _ROUTE | {
        "name": "a group too many kept",
        "old": "before < top_groups",
        "new": "before <= top_groups",
    },
    _ROUTE | {
        "name": "logits read past the last expert",
        "old": "if (lane * kPerLane + i < experts) logit",
        "new": "if (true) logit",
    },
    _ROUTE | {
        "name": "rows taken for dense",
        "old": "logits + token * logits_stride",
        "new": "logits + token * experts",
    },
    _ROUTE | {
        "name": "the last weight left out of the sum",
        "old": "for (int j = 0; j < top_k; ++j) sum",
        "new": "for (int j = 0; j + 1 < top_k; ++j) sum",
    },
    _ROUTE | {
        "name": "a row without a number weighed",
        "old": "under > 0.0f ?",
        "new": "true ?",
    },
    _ROUTE | {
        "name": "the sigmoid of negative logits mirrored",
        "old": "sigmoid && !(x < 0.0f) ? 1.0f : e",
        "new": "sigmoid ? 1.0f : e",
    },
    _ROUTE | {
        "name": "minus infinity weighed by a sigmoid",
        "old": "return x == kiln::minus_infinity() ? 0.0f : e;",
        "new": "return e;",
    },
    _ROUTE | {
        "name": "the bias of experts that there are not",
        "old": "bias && expert < experts ?",
        "new": "bias ?",
    },
    _ROUTE | {
        "name": "all experts of a lane kept or none",
        "old": "(expert < experts ? kept >> group & 1 : 0) << i;",
        "new": "(expert < experts && kept >> group & 1 ? kAll : 0);",
    },
    _ROUTE | {
        "name": "later tokens of a block left out",
        "old": "token += int64_t(gridDim.x) * warps",
        "new": "token += int64_t(gridDim.x) * warps * 2",
        "few_blocks": True,
    },
    _ALIGN | {
        "name": "dropped barrier after the counts are cleared",
        "old": "places[i] = 0;\n  __syncthreads();",
        "new": "places[i] = 0;",
    },
    _ALIGN | {
        "name": "dropped barrier after counting",
        "old": "Stretch placed(ids, begin, end);\n  __syncthreads();",
        "new": "Stretch placed(ids, begin, end);",
    },
    _ALIGN | {
        "name": "dropped barrier inside the sum",
        "old": "partial[warp] = x;\n  __syncthreads();",
        "new": "partial[warp] = x;",
    },
    _ALIGN | {
        "name": "dropped barrier before the runs are filled",
        "old": "run_end * block_size;\n  }\n  __syncthreads();",
        "new": "run_end * block_size;\n  }",
    },
    _ALIGN | {
        "name": "dropped warp barrier between a place's reader and its writer",
        "old": "mine[expert] : 0;\n    __syncwarp();",
        "new": "mine[expert] : 0;",
    },
    _ALIGN | {
        "name": "dropped warp barrier between a place's writer and its next reader",
        "old": "before + __popc(peers);\n    __syncwarp();",
        "new": "before + __popc(peers);",
    },
    _ALIGN | {
        "name": "counted one by one without an atomic operation",
        "old": "atomicAdd(mine + expert, 1);",
        "new": "mine[expert] += 1;",
    },
    _ALIGN | {
        "name": "an id of another group of 32",
        "old": "at(first + 32 * kAhead)",
        "new": "at(first + 32 * (kAhead - 1))",
    },
    _ALIGN | {
        "name": "pairs of an expert in the wrong order",
        "old": "const int rank = before + __popc(peers & ((1u << lane) - 1));",
        "new": "const int rank = before + __popc(peers & ~((2u << lane) - 1));",
    },
    _ALIGN | {
        "name": "too few bits of an expert compared",
        "old": "kExpertBits = 9",
        "new": "kExpertBits = 8",
    },
    _ALIGN | {
        "name": "an id past the last expert counted",
        "old": "expert >= 0 && expert < experts",
        "new": "expert >= 0",
    },
    _ALIGN | {
        "name": "earlier warps left out of the sum",
        "old": "lane < warp ? partial[lane] : 0",
        "new": "0",
    },
    _ALIGN | {
        "name": "runs not filled up",
        "old": "sorted_token_ids[at] = pairs;\n    for",
        "new": "{}\n    for",
    },
    _ALIGN | {
        "name": "the rest filled past its end",
        "old": "for (int b = all + place; b < blocks;",
        "new": "for (int b = all + place; b <= blocks;",
    },
    _ALIGN | {
        "name": "an expert of two blocks",
        "old": "min(first_own + share, experts)",
        "new": "min(first_own + share + 1, experts)",
    },
    _ALIGN | {
        "name": "experts that no block has",
        "old": "(experts + int(gridDim.x) - 1) / int(gridDim.x)",
        "new": "experts / int(gridDim.x) - 1 + (gridDim.x == 1)",
    },
    _ALIGN | {
        "name": "runs not padded",
        "old": "(count + block_size - 1) / block_size",
        "new": "count / block_size",
    },
]  # fmt: skip
