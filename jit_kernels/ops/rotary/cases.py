"""The cases on which the rotary embedding is tested and timed."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.spec import DTYPES, Sizes, Variant

SIZES = [
    {"tokens": tokens, "heads": heads, "kv_heads": kv_heads, "half": half, "rest": rest, "gap": gap}
    for tokens, heads, kv_heads, half, rest, gap in [
        (0, 2, 1, 8, 0, 0), (1, 1, 1, 1, 0, 0), (3, 4, 2, 16, 0, 5), (2, 5, 1, 3, 3, 1),
        (7, 8, 8, 32, 0, 0), (2, 3, 1, 64, 16, 8), (3, 40, 3, 128, 0, 0), (2, 9, 2, 8, 8, 4),
        (2, 3, 1, 12, 8, 0), (2, 7, 2, 48, 0, 0), (260, 3, 2, 8, 0, 0),
    ]
]  # fmt: skip
BENCH_SIZES = [
    {"tokens": tokens, "heads": 32, "kv_heads": 8, "half": 64}
    for tokens in (1, 16, 128, 1024, 8192)
]


def rotary_inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, torch.Tensor]:
    """Return random query and key, views of one projection, at random positions."""
    tokens, heads, kv_heads = sizes["tokens"], sizes["heads"], sizes["kv_heads"]
    head_dim = 2 * sizes["half"] + sizes.get("rest", 0)
    width = (heads + kv_heads) * head_dim
    qkv = torch.randn(tokens, width + sizes.get("gap", 0), device=device)
    qkv = qkv.to(DTYPES[variant["scalar_t"]])
    angles = torch.rand(64, sizes["half"], device=device) * 100
    return {
        "query": qkv[:, : heads * head_dim].view(tokens, heads, head_dim),
        "key": qkv[:, heads * head_dim : width].view(tokens, kv_heads, head_dim),
        "cos_sin_table": torch.cat((angles.cos(), angles.sin()), dim=-1),
        "positions": torch.randint(64, (tokens,), device=device),
    }
