"""Faults planted in the kernels of prefill attention; see test_faults.py."""

_BF16 = {"scalar_t": "kiln::bf16", "head_tile": "64", "kv_t": "SCALAR_T", "soft_cap": "false"}
_FP8 = {**_BF16, "kv_t": "kiln::e4m3"}
_WIDE = {**_BF16, "head_tile": "256"}  # one tile of keys

FAULTS = [
    {"kernel": "paged_prefill", "needs": _BF16, **fault}
    for fault in [
        {
            "name": "keys not waited for",
            "old": "      kiln::copy_wait<0>();\n      __syncthreads();  // the keys",
            "new": "      __syncthreads();  // the keys",
        },
        {
            "name": "values not waited for",
            "old": "kiln::copy_wait<kStages - 1>();",
            "new": "",
        },
        {
            "name": "values waited for one group short",
            "old": "kiln::copy_wait<kStages - 1>();",
            "new": "kiln::copy_wait<kStages>();",
        },
        {
            "name": "no barrier before the keys are read",
            "old": "__syncthreads();  // the keys",
            "new": "// the keys",
        },
        {
            "name": "no barrier before the values are read",
            "old": "__syncthreads();  // the values are there",
            "new": "// the values are there",
        },
        {
            "name": "no barrier before the next item's copies",
            "old": "__syncthreads();  // every warp",
            "new": "// every warp",
            "few_blocks": True,
            "seeds": 8,
        },
        {
            "name": "tail of the pool read",
            "old": "row + low < valid);",
            "new": "true);",
        },
        {
            "name": "block table read past its end",
            "old": "lane < num_blocks ? table[lane] : 0",
            "new": "table[lane]",
        },
        {
            "name": "block table read past its end later on",
            "old": "next < known.num_blocks ? known.table[next] : 0",
            "new": "known.table[next]",
        },
        {
            "name": "block ids not refilled",
            "old": "if (i * kBlocks % kAhead == 0) {",
            "new": "if (i == 0) {",
        },
        {
            "name": "32-bit offset of a block",
            "old": "known.key_pool + id * key_block;",
            "new": "known.key_pool + int(id * key_block * 1048576) / 1048576;",
        },
        {
            "name": "block ids of the next tile for the values",
            "old": "      } else {\n        fetch_values(i);\n        kiln::copy_commit();",
            "new": "      } else {\n        fetch_values(i + 1 < count ? i + 1 : i);\n"
            "        kiln::copy_commit();",
        },
        {
            "name": "key of the next token seen",
            "old": "return seq_len - num_tokens + token + 1;",
            "new": "return seq_len - num_tokens + token + 2;",
            "header": "kiln/attention_tiles.cuh",
        },
        {
            "name": "window one short",
            "old": "n * 8 + i < end - within",
            "new": "n * 8 + i <= end - within",
            "header": "kiln/attention_softmax.cuh",
        },
        {
            "name": "sum not rescaled",
            "old": "sum[m][j] *= f;",
            "new": "",
            "header": "kiln/attention_softmax.cuh",
        },
        {
            "name": "result not rescaled",
            "old": "o[m][c][2 * j] *= f, o[m][c][2 * j + 1] *= f;",
            "new": "o[m][c][2 * j] *= f;",
            "header": "kiln/attention_softmax.cuh",
        },
        {
            "name": "infinity less infinity",
            "old": "return top > minus_infinity() ? top : 0.0f;",
            "new": "return top;",
            "header": "kiln/attention_logits.cuh",
        },
        {
            "name": "no barrier between lanes before the result takes the queries' place",
            "old": "    __syncwarp();\n    finish(",
            "new": "    finish(",
        },
        {
            "name": "no barrier between lanes before the result leaves",
            "old": "  __syncwarp();\n#pragma unroll 1\n  for (int i = lane; i < rows.count",
            "new": "#pragma unroll 1\n  for (int i = lane; i < rows.count",
        },
        {
            "name": "no barrier between lanes before addresses are read",
            "old": ": 0;\n        __syncwarp();",
            "new": ": 0;",
        },
        {
            "name": "addresses overwritten that other lanes still read",
            "old": "__syncwarp();  // nobody reads",
            "new": "// nobody reads",
            "seeds": 3,
        },
        {
            "name": "no barrier between lanes before norms are read",
            "old": "  }\n  __syncwarp();\n#pragma unroll\n  for (int m = 0;",
            "new": "  }\n#pragma unroll\n  for (int m = 0;",
        },
        {
            "name": "norm of another row",
            "old": "const float f = norms[row];",
            "new": "const float f = norms[row ^ 8];",
        },
        {
            "name": "own top not kept",
            "old": "top[m][j] = rose[j] ? best[j] : top[m][j];",
            "new": "top[m][j] = best[j];",
            "header": "kiln/attention_softmax.cuh",
        },
        {
            "name": "rows of padding stored",
            "old": "i < rows.count * kChunks; i += 32",
            "new": "i < 16 * kParts * kChunks; i += 32",
        },
        {
            "name": "columns past head_dim read",
            "old": "= inside ? min(",
            "new": "= true ? min(",
        },
        {
            "name": "columns past head_dim stored",
            "old": "if (chunk * 8 >= head_dim) continue;",
            "new": "",
        },
        {
            "name": "queries past head_dim loaded",
            "old": "row < rows.count && chunk * 8 < head_dim);",
            "new": "row < rows.count);",
        },
        {
            "name": "rows of padding loaded",
            "old": "row < rows.count && chunk * 8 < head_dim);",
            "new": "chunk * 8 < head_dim);",
        },
        {
            "name": "item left out",
            "old": "next_work[turn] = take();",
            "new": "next_work[turn] = take() + 1;",
            "few_blocks": True,
        },
        {
            "name": "next item in the place of this one",
            "old": "    turn ^= 1;\n",
            "new": "",
            "few_blocks": True,
            "seeds": 8,
        },
        {
            "name": "window not masked where no key is out of reach",
            "old": "if (key < last - within || key + kKeys > first) {",
            "new": "if (key + kKeys > first) {",
        },
        {
            "name": "causality not masked where no key is too old",
            "old": "if (key < last - within || key + kKeys > first) {",
            "new": "if (key < last - within) {",
        },
        {
            "name": "tile left out by a warp that sees a part of it",
            "old": "seen = key < last &&",
            "new": "seen = key + kKeys <= last &&",
        },
        {
            "name": "first head of the group for all",
            "old": "return head + (first + row) % group;",
            "new": "return head;",
            "header": "kiln/attention_tiles.cuh",
        },
        {
            "name": "sink of the first head for all",
            "old": "sinks[rows.head_of(lane)] * kLog2e",
            "new": "sinks[0] * kLog2e",
        },
        {
            "name": "no cap",
            "old": "kiln::cap_logits(s, soft_cap, scale);",
            "new": "kiln::cap_logits(s, 100.0f, scale);",
            "needs": {**_BF16, "head_tile": "128", "soft_cap": "true"},
        },
        {
            "name": "counter left as it is",
            "old": "kiln::arrive(counter, num_work() - 1)",
            "new": "kiln::arrive(counter, num_work())",
        },
        {
            "name": "next keys over those that others still read",
            "old": "__syncthreads();  // the values are there",
            "new": "// the values are there",
            "needs": _WIDE,
            "seeds": 3,
        },
        {
            "name": "next keys over those that are not yet widened",
            "old": "__syncthreads();  // the tile is there",
            "new": "// the tile is there",
            "needs": _FP8,
        },
        {
            "name": "values widened from keys",
            "old": "widen(values, raw_values);",
            "new": "widen(values, raw_keys);",
            "needs": _FP8,
        },
        {
            "name": "halves of a chunk swapped",
            "old": "(2 * chunk + half) * 16",
            "new": "(2 * chunk + 1 - half) * 16",
            "needs": _FP8,
        },
    ]
] + [
    {"kernel": "prefill_plan", "needs": {}, **fault}
    for fault in [
        {
            "name": "no barrier before the counts are read",
            "old": "counts[warp] = count;\n  __syncthreads();",
            "new": "counts[warp] = count;",
        },
        {
            "name": "lightest first",
            "old": "low = (kRanges - 1 - warp) << shift, high = (kRanges - warp) << shift",
            "new": "low = warp << shift, high = (warp + 1) << shift",
        },
        {
            "name": "first tile of a range first",
            "old": "tile = first + end_of - 1 - i;",
            "new": "tile = first + i - (end_of - __shfl_sync(kWarp, own_count, from));",
        },
        {
            "name": "tiles of decode's requests",
            "old": "served = x.num_tokens > kMostTokens;",
            "new": "served = x.num_tokens > 0;",
            "header": "kiln/attention_tiles.cuh",
        },
        {
            "name": "last tile dropped",
            "old": "(x.num_tokens * group + kPrefillRows - 1) / kPrefillRows",
            "new": "x.num_tokens * group / kPrefillRows",
            "header": "kiln/attention_tiles.cuh",
        },
        {
            "name": "end past the request's tokens",
            "old": "min(num_tokens - 1, (tile * kPrefillRows + kPrefillRows - 1) / group)",
            "new": "(tile * kPrefillRows + kPrefillRows - 1) / group",
            "header": "kiln/attention_tiles.cuh",
        },
        {
            "name": "table written past its end",
            "old": "if (i >= total || at + i >= capacity) continue;",
            "new": "if (i >= total + 1) continue;",
        },
        {
            "name": "no barrier before the tops are read",
            "old": "tops[warp] = most;\n  __syncthreads();",
            "new": "tops[warp] = most;",
        },
        {
            "name": "first tile of a weight one late",
            "old": "(weight - 1) * kiln::kKVBlock -",
            "new": "weight * kiln::kKVBlock -",
        },
        {
            "name": "weights past the window's",
            "old": "token >= x.num_tokens || weight > most_weight();",
            "new": "token >= x.num_tokens;",
        },
        {
            "name": "last chunk of requests only",
            "old": "    at += total;\n",
            "new": "",
        },
        {
            "name": "tile of the request before",
            "old": "if (begin <= i) from += step;",
            "new": "if (begin < i) from += step;",
        },
        {
            "name": "sum over half of the lanes",
            "old": "for (int d = 1; d < 32; d *= 2) {",
            "new": "for (int d = 1; d < 16; d *= 2) {",
        },
    ]
]
