"""MiniMax-M2: whole heads or a part of each rotated."""

from __future__ import annotations

from typing import Any

from tiny.model import ATTENTION, Tiny

SIZES = {
    "num_attention_heads": 6,
    "head_dim": 20,
    "intermediate_size": 28,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
}


def published(content: dict[str, Any]) -> None:
    """Write what files of 2025 have."""
    content["rope_theta"] = content.pop("rope_parameters")["rope_theta"]
    content.update(
        rotary_dim=10, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid",
        use_routing_bias=True, attn_type_list=[1, 1], use_mtp=True, num_mtp_modules=3,
        mtp_transformer_layers=1, shared_intermediate_size=0,
    )  # fmt: skip


MODELS = [
    Tiny("minimax-m2", "MiniMaxM2Config", SIZES, targets=ATTENTION),
    Tiny(
        "minimax-m2-published", "MiniMaxM2Config",
        {**SIZES, "rotary_dim": 10}, published, targets=ATTENTION,
    ),
]  # fmt: skip
