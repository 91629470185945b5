"""The cases on which the kernels that write the KV pool are tested and timed."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant

ROPE_STORE_SIZES: list[Sizes] = [
    {"tokens": 0, "heads": 2, "kv_heads": 1, "head_dim": 16},
    {"tokens": 1, "heads": 1, "kv_heads": 1, "head_dim": 64, "norm": 1},
    {"tokens": 5, "heads": 4, "kv_heads": 2, "head_dim": 128, "norm": 1, "unstored": 1},
    {"tokens": 3, "heads": 3, "kv_heads": 1, "head_dim": 80, "rotary_dim": 32, "gap": 8},
    {"tokens": 4, "heads": 5, "kv_heads": 5, "head_dim": 96, "norm": 1, "block_size": 4},
    {"tokens": 7, "heads": 2, "kv_heads": 3, "head_dim": 64, "rotary_dim": 16, "norm": 1, "once": 1,
     "block_size": 3},
    {"tokens": 2, "heads": 6, "kv_heads": 1, "head_dim": 256, "norm": 1, "offset": 1, "gap": 16},
    {"tokens": 3, "heads": 3, "kv_heads": 2, "head_dim": 80, "rotary_dim": 0, "norm": 1},
    {"tokens": 2, "heads": 4, "kv_heads": 1, "head_dim": 128, "rotary_dim": 0},
    {"tokens": 1, "heads": 64, "kv_heads": 4, "head_dim": 128},
    {"tokens": 260, "heads": 9, "kv_heads": 2, "head_dim": 16, "norm": 1, "unstored": 2},
]  # fmt: skip
ROPE_STORE_BENCH_SIZES: list[Sizes] = [
    {"tokens": tokens, "heads": 32, "kv_heads": 8, "head_dim": 128}
    for tokens in (1, 16, 128, 256, 1024, 8192)
]
COPY_BLOCKS_SIZES: list[Sizes] = [
    {"pairs": 0, "pools": 2, "block_bytes": 64},
    {"pairs": 1, "pools": 1, "block_bytes": 16},
    {"pairs": 4, "pools": 3, "block_bytes": 4112, "gap": 8},
    {"pairs": 2, "pools": 2, "block_bytes": 16400},
    {"pairs": 3, "pools": 1, "block_bytes": 32768, "gap": 16},
]
COPY_BLOCKS_BENCH_SIZES: list[Sizes] = [
    {"pairs": pairs, "pools": 32, "block_bytes": 65536} for pairs in (1, 16, 64)
]


def rope_store_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    """Return one projection's query, key and value, and both pools in one tensor."""
    dtype, fp8 = DTYPES[variant["scalar_t"]], variant["kv_t"] == "kiln::e4m3"
    tokens, heads, kv_heads = sizes["tokens"], sizes["heads"], sizes["kv_heads"]
    head_dim, block_size = sizes["head_dim"], sizes.get("block_size", 16)
    all_heads = heads + 2 * kv_heads
    qkv = torch.randn(tokens, all_heads * head_dim + sizes.get("gap", 0), device=device).to(dtype)
    split = qkv[:, : all_heads * head_dim].view(tokens, all_heads, head_dim)
    query, key, value = torch.split(split, [heads, kv_heads, kv_heads], dim=1)
    blocks = -(-tokens // block_size) + 2
    # Key and value blocks interleaved, heads before tokens: the engine's layout.
    pool = torch.randn(blocks, 2, kv_heads, block_size, head_dim, device=device)
    pool = pool.to(torch.float8_e4m3fn if fp8 else dtype)
    slots = torch.randperm(blocks * block_size, device=device)[:tokens]
    if "unstored" in sizes:
        slots[sizes["unstored"] :: 3] = -1
    angles = torch.rand(64, sizes.get("rotary_dim", head_dim) // 2, device=device) * 100
    weights: list[torch.Tensor | None] = [None, None]
    if sizes.get("norm", 0):
        weights = [torch.rand(head_dim, device=device).add_(0.5).to(dtype) for _ in range(2)]
    return {
        "out": query.new_empty(query.shape),
        "key_pool": pool[:, 0],
        "value_pool": pool[:, 1],
        "query": query,
        "key": key,
        "value": value,
        "positions": torch.randint(64, (tokens,), device=device),
        "cos_sin_table": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "slot_mapping": slots,
        "query_weight": weights[0],
        "key_weight": weights[1],
        "eps": 1e-6,
        "weight_offset": float(sizes.get("offset", 0)),
        "round_once": bool(sizes.get("once", 0)),
        "k_scale": 0.75 if fp8 else 1.0,
        "v_scale": 0.5 if fp8 else 1.0,
    }


def copy_blocks_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, torch.Tensor]:
    """Return pools of random numbers, and pairs; a third of the pairs is padding."""
    num, pools, elements = sizes["pairs"], sizes["pools"], sizes["block_bytes"] // 2
    both = torch.randn(pools, 2 * num + 1, elements + sizes.get("gap", 0), device=device)
    pairs = torch.randperm(2 * num + 1, device=device)[: 2 * num].view(num, 2)
    pairs[2::3, 0] = -1
    return {"pool": both.to(torch.bfloat16)[..., :elements], "pairs": pairs}
