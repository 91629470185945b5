"""Faults planted in the kernels of prefill attention; see test_faults.py."""

_BF16 = {"scalar_t": "kiln::bf16", "head_tile": "64", "kv_t": "SCALAR_T", "soft_cap": "false"}
_FP8 = {**_BF16, "kv_t": "kiln::e4m3"}
_LARGE = {**_BF16, "head_tile": "128"}
_WIDE = {**_BF16, "head_tile": "256"}  # one tile of keys
_PREFILL = [
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
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "tail of the pool read",
        "old": "row + low < valid);",
        "new": "true);",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "block table read past its end",
        "old": "lane < num_blocks ? table[lane] : 0",
        "new": "table[lane]",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "block table read past its end later on",
        "old": "next < state.num_blocks ? state.table[next] : 0",
        "new": "state.table[next]",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "block ids not refilled",
        "old": "if (i * kBlocks % kAheadBlocks == 0) {",
        "new": "if (i == 0) {",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "32-bit offset of a block",
        "old": "state.key_pool + id * x.key_block;",
        "new": "state.key_pool + int(id * x.key_block * 1048576) / 1048576;",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "block ids of the next tile for the values",
        "old": "fetch_values(i, raw_values);",
        "new": "fetch_values(i + 1 < count ? i + 1 : i, raw_values);",
    },
    {
        "name": "key of the next token seen",
        "old": "return seq_len - num_tokens + token + 1;",
        "new": "return seq_len - num_tokens + token + 2;",
        "header": "attention_prefill/tiles.cuh",
    },
    {
        "name": "window one short",
        "old": "n * 8 + i < begin",
        "new": "n * 8 + i <= begin",
        "header": "attention_prefill/softmax.cuh",
    },
    {
        "name": "chunks begin at an item's first key",
        "old": "first_visible(limit + origin, x.window) - origin",
        "new": "first_visible(limit, x.window)",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "chunk of the next token seen",
        "old": "position = max(0, end - 1)",
        "new": "position = max(0, end)",
        "header": "kiln/attention/visible.cuh",
    },
    {
        "name": "a row sees itself alone where tiles are left out",
        "old": "seen.begin = begin, seen.all_end = rows.count < 16 * kParts ? 0 : limit;",
        "new": "seen.begin = limit - 1, seen.all_end = rows.count < 16 * kParts ? 0 : limit;",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "sum not rescaled",
        "old": "sum[j] *= f[j];",
        "new": "",
        "header": "attention_prefill/softmax.cuh",
    },
    {
        "name": "result not rescaled",
        "old": "o[c][2] *= f[1], o[c][3] *= f[1];",
        "new": "o[c][2] *= f[1];",
        "header": "attention_prefill/softmax.cuh",
    },
    {
        "name": "infinity less infinity",
        "old": "return top > minus_infinity() ? top : 0.0f;",
        "new": "return top;",
        "header": "kiln/attention/logits.cuh",
    },
    {
        "name": "no barrier between lanes before the result takes the queries' place",
        "old": "    __syncwarp();\n    finish<",
        "new": "    finish<",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "no barrier between lanes before the result leaves",
        "old": "  __syncwarp();\n#pragma unroll 1\n  for (int i = lane; i < rows.count",
        "new": "#pragma unroll 1\n  for (int i = lane; i < rows.count",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "no barrier between lanes before addresses are read",
        "old": ": 0;\n        __syncwarp();",
        "new": ": 0;",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "addresses overwritten that other lanes still read",
        "old": "__syncwarp();  // nobody reads",
        "new": "// nobody reads",
        "seeds": 3,
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "no barrier between lanes before norms are read",
        "old": "  }\n  __syncwarp();\n#pragma unroll\n  for (int m = 0;",
        "new": "  }\n#pragma unroll\n  for (int m = 0;",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "norm of another row",
        "old": "const float f = norms[row];",
        "new": "const float f = norms[row ^ 8];",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "own top not kept",
        "old": "top[j] = rose[j] ? best[j] : top[j];",
        "new": "top[j] = best[j];",
        "header": "attention_prefill/softmax.cuh",
    },
    {
        "name": "rows of padding stored",
        "old": "i < rows.count * kChunks; i += 32",
        "new": "i < 16 * kParts * kChunks; i += 32",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "columns past head_dim read",
        "old": "= inside ? min(",
        "new": "= true ? min(",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "columns past head_dim stored",
        "old": "if (chunk * 8 >= x.head_dim) continue;",
        "new": "",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "queries past head_dim loaded",
        "old": "row < rows.count && chunk * 8 < x.head_dim);",
        "new": "row < rows.count);",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "rows of padding loaded",
        "old": "row < rows.count && chunk * 8 < x.head_dim);",
        "new": "chunk * 8 < x.head_dim);",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "item left out",
        "old": "next_work[turn] = take();",
        "new": "next_work[turn] = take() + 1;",
        "few_blocks": True,
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "next item in the place of this one",
        "old": "    turn ^= 1;\n",
        "new": "",
        "few_blocks": True,
        "seeds": 8,
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "window not masked where no key is out of reach",
        "old": "if (key >= visible.all_begin && key + N * 8 <= visible.all_end) return;",
        "new": "if (key + N * 8 <= visible.all_end) return;",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "causality not masked where no key is too old",
        "old": "if (key >= visible.all_begin && key + N * 8 <= visible.all_end) return;",
        "new": "if (key >= visible.all_begin) return;",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "tile left out by a warp that sees a part of it",
        "old": "visible = key < seen.end &&",
        "new": "visible = key + kKeys <= seen.end &&",
    },
    {
        "name": "first head of the group for all",
        "old": "return head + (first + row) % group;",
        "new": "return head;",
        "header": "attention_prefill/tiles.cuh",
    },
    {
        "name": "sink of the first head for all",
        "old": "x.sinks[rows.head_of(lane)] * kLog2e",
        "new": "x.sinks[0] * kLog2e",
        "header": "attention_prefill/prefill.cuh",
    },
    {
        "name": "no cap",
        "old": "kiln::cap_logits(s, x.soft_cap, x.scale);",
        "new": "kiln::cap_logits(s, 100.0f, x.scale);",
        "needs": {**_BF16, "head_tile": "128", "soft_cap": "true"},
    },
    {
        "name": "counter left as it is",
        "old": "arrive(x.counter, num_work() - 1)",
        "new": "arrive(x.counter, num_work())",
        "header": "attention_prefill/prefill.cuh",
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
_WGMMA = [
    {
        "name": "tiles not waited for",
        "old": "kiln::copy_wait<0>();\n      kiln::publish",
        "new": "kiln::publish",
    },
    {
        "name": "no barrier before tiles are multiplied",
        "old": "__syncthreads();\n      kiln::wgmma_fence();",
        "new": "kiln::wgmma_fence();",
    },
    {
        "name": "tiles not published to the tensor cores",
        "old": "kiln::publish_to_wgmma();",
        "new": "",
    },
    {
        "name": "no fence after registers are written",
        "old": "__syncthreads();\n      kiln::wgmma_fence();",
        "new": "__syncthreads();",
    },
    {
        "name": "first logits not waited for",
        "old": "kiln::wgmma_wait<0>();\n    find_weights(0);",
        "new": "find_weights(0);",
    },
    {
        "name": "logits not waited for",
        "old": "kiln::wgmma_wait<1>();",
        "new": "",
    },
    {
        "name": "logits waited for one group short",
        "old": "kiln::wgmma_wait<1>();",
        "new": "kiln::wgmma_wait<2>();",
    },
    {
        "name": "sums not waited for before they are rescaled",
        "old": "kiln::wgmma_wait<0>();\n      if (rises)",
        "new": "if (rises)",
    },
    {
        "name": "last sums not waited for",
        "old": "values(count - 1));\n    kiln::wgmma_wait<0>();",
        "new": "values(count - 1));",
    },
    {
        "name": "logits in the group of the values",
        "old": "      else kiln::wgmma<SCALAR_T, true>(s, a, b);\n    }\n    kiln::wgmma_commit();",
        "new": "      else kiln::wgmma<SCALAR_T, true>(s, a, b);\n    }",
    },
    {
        "name": "weights replaced while they are multiplied",
        "old": "const bool rises = find_weights(i);",
        "new": "const bool rises = find_weights(i);\n      pack(p, s[0]);",
    },
    {
        "name": "one tile of keys",
        "old": "return tiles + i % 2 * kTile;",
        "new": "return tiles;",
    },
    {
        "name": "one tile of values",
        "old": "return tiles + (2 + i % 2) * kTile;",
        "new": "return tiles + 2 * kTile;",
    },
    {
        "name": "queries of the first warps for all",
        "old": "queries() + threadIdx.x / 128 * 64 * 128;",
        "new": "queries();",
    },
    {
        "name": "first panel of keys alone",
        "old": "keys + k / 4 * kPanel + k % 4 * 32",
        "new": "keys + k % 4 * 32",
        "needs": _LARGE,
    },
    {
        "name": "first panel of queries alone",
        "old": "queries + k / 4 * kQueryPanel + k % 4 * 32",
        "new": "queries + k % 4 * 32",
        "needs": _LARGE,
    },
    {
        "name": "second panel of values a row on",
        "old": "kiln::panel(values + n * 16 * 128, kPanel)",
        "new": "kiln::panel(values + n * 16 * 128, 128)",
        "needs": _LARGE,
    },
    {
        "name": "values of the first keys for all",
        "old": "values + n * 16 * 128",
        "new": "values",
    },
    {
        "name": "logits of the tile before kept",
        "old": "if (k == 0) kiln::wgmma<SCALAR_T, false>",
        "new": "if (k == 99) kiln::wgmma<SCALAR_T, false>",
    },
    {
        "name": "result not rescaled",
        "old": "if (rises) kiln::rescale(sums.o[0], f);",
        "new": "",
    },
    {
        "name": "values of the last tile left out",
        "old": "    next_tiles();\n    add_values(sums, p, values(count - 1));",
        "new": "",
    },
    {
        "name": "values of the tile after",
        "old": "add_values(sums, p, values(i - 1));",
        "new": "add_values(sums, p, values(i));",
    },
    {
        "name": "weights of the keys after",
        "old": "s[2 * n + i / 2] + i % 2 * 2;",
        "new": "s[2 * n + i % 2] + i / 2 * 2;",
    },
    {
        "name": "keys of another tile hidden",
        "old": "(&state.visible), i * kKeys)",
        "new": "(&state.visible), 0)",
    },
    {
        "name": "chunks of a panel in a row",
        "old": "((chunk ^ row) & 7) * 16",
        "new": "(chunk & 7) * 16",
        "header": "kiln/ptx/wgmma.cuh",
    },
    {
        "name": "panels begin anywhere",
        "old": "return p + (1024",
        "new": "return p + 16 + (1024",
        "header": "kiln/ptx/wgmma.cuh",
    },
]
_PLAN = [
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
        "header": "attention_prefill/tiles.cuh",
    },
    {
        "name": "last tile dropped",
        "old": "(x.num_tokens * group + kPrefillRows - 1) / kPrefillRows",
        "new": "x.num_tokens * group / kPrefillRows",
        "header": "attention_prefill/tiles.cuh",
    },
    {
        "name": "end past the request's tokens",
        "old": "min(num_tokens - 1, (tile * kPrefillRows + kPrefillRows - 1) / group)",
        "new": "(tile * kPrefillRows + kPrefillRows - 1) / group",
        "header": "attention_prefill/tiles.cuh",
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
        "name": "weights past a chunk's",
        "old": "max(window, -window)",
        "new": "window",
    },
    {
        "name": "blocks of the chunk before",
        "old": "first_visible(limit(tile * kPrefillRows / group), window)",
        "new": "first_visible(limit(tile * kPrefillRows / group) - 1, window)",
        "header": "attention_prefill/tiles.cuh",
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
FAULTS = [
    {"kernel": kernel, "needs": needs, **fault}
    for kernel, needs, faults in [
        ("paged_prefill", _BF16, _PREFILL),
        ("paged_prefill_wgmma", _BF16, _WGMMA),
        ("prefill_plan", {}, _PLAN),
    ]
    for fault in faults
]
