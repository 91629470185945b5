"""Faults planted in the kernels that write the KV pool; see test_faults.py."""

from functools import partial

from norm_rounding import rounds_elsewhere

_FP8 = {"scalar_t": "kiln::bf16", "kv_t": "kiln::e4m3"}
_ONCE = {"tokens": 20, "heads": 2, "kv_heads": 2, "head_dim": 64, "norm": 1, "once": 1}

FAULTS = [
    {"kernel": "rope_store", **fault}
    for fault in [
        {
            "name": "slots of padding written",
            "old": "} else if (slot >= 0) {",
            "new": "} else {",
        },
        {
            "name": "slot of the neighbour",
            "old": "(odd ? slot_mapping : positions)[token];",
            "new": "(odd ? slot_mapping - (token ? 1 : 0) : positions)[token];",
        },
        {
            "name": "block of the position",
            "old": "slot >> block_shift",
            "new": "position >> block_shift",
        },
        {
            "name": "block of the position where blocks are of no power of two",
            "old": "uint32_t(slot) / uint32_t(block_size)",
            "new": "position / block_size",
        },
        {
            "name": "value stored as key",
            "old": "is_value ? value_pool",
            "new": "false ? value_pool",
        },
        {
            "name": "wrong row of the table",
            "old": "table + position * 2 * half + i",
            "new": "table + token * 2 * half + i",
        },
        {
            "name": "wrong sign",
            "old": "sub_rn(mul_rn(a, c), mul_rn(b, s))",
            "new": "add_rn(mul_rn(a, c), mul_rn(b, s))",
            "header": "kiln/rows/rotate.cuh",
        },
        {
            "name": "partner of a whole head in a part of it",
            "old": "rotated ? thread + pieces",
            "new": "rotated ? thread + team",
        },
        {
            "name": "values rotated",
            "old": "place.rotated && !is_value",
            "new": "place.rotated",
        },
        {
            "name": "values normalised",
            "old": "scales_first = has_first && !is_value",
            "new": "scales_first = has_first",
        },
        {
            "name": "second chunks not normalised",
            "old": "scales_second = has_second && !is_value",
            "new": "scales_second = false",
        },
        {
            "name": "neighbours that are not rotated taken for a pair",
            "old": ": chunk / 2;",
            "new": ": chunk % team;",
        },
        {
            "name": "sum over the lanes of a head left short",
            "old": "m = place.team / 2; m; m >>= 1)",
            "new": "m = place.team / 2; m > 1; m >>= 1)",
        },
        {
            "name": "sum over the lanes of two heads",
            "old": "m = place.team / 2; m; m >>= 1)",
            "new": "m = 16; m; m >>= 1)",
        },
        {
            "name": "query's weights for keys",
            "old": "is_query ? query_weight : key_weight",
            "new": "query_weight",
        },
        {
            "name": "two roundings in place of one",
            "old": "if (!once) {",
            "new": "if (true) {",
            "scenario": partial(rounds_elsewhere, sizes=_ONCE),
        },
        {
            "name": "one rounding in place of two",
            "old": "if (!once) {",
            "new": "if (false) {",
            "scenario": partial(rounds_elsewhere, sizes={**_ONCE, "once": 0}),
        },
        {"name": "no weight offset", "old": "kiln::add_rn(factor[k], offset)", "new": "factor[k]"},
        {
            "name": "heads without positions rotated",
            "old": "rotated = thread < pieces;",
            "new": "rotated = thread < max(pieces, 1);",
        },
        {
            "name": "no mean",
            "old": "sum_of_squares(a, b, place), inverse_dim)",
            "new": "sum_of_squares(a, b, place), 1.0f)",
        },
        {
            "name": "heads past the last",
            "old": "there = kv_head < 2 * kv_heads;",
            "new": "there = true;",
        },
        {
            "name": "last head dropped",
            "old": "there = kv_head < 2 * kv_heads;",
            "new": "there = kv_head < 2 * kv_heads - 1;",
        },
        {
            "name": "chunks past head_dim",
            "old": "there && place.second < place.chunks;",
            "new": "there;",
        },
        {
            "name": "scale not divided by",
            "old": "kiln::div_rn(y[k], scale)",
            "new": "y[k]",
            "needs": _FP8,
        },
        {
            "name": "key's scale for values",
            "old": "is_value ? v_scale : k_scale",
            "new": "k_scale",
            "needs": _FP8,
        },
    ]
] + [
    {"kernel": "copy_blocks", "needs": {}, **fault}
    for fault in [
        {"name": "tail past the block", "old": "if (begin + u * step < block_bytes)", "new": ""},
        {
            "name": "a piece left out",
            "old": "blockIdx.x) * kInFlight",
            "new": "blockIdx.x) * 2 * kInFlight",
        },
        {"name": "first pool only", "old": "blockIdx.y * pool_stride", "new": "0"},
        {"name": "padding copied", "old": "if (source < 0) continue;", "new": ""},
        {
            "name": "source and target swapped",
            "old": "pairs[2 * pair], t",
            "new": "pairs[2 * pair + 1], t",
        },
    ]
]
