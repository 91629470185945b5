"""Qwen3 with experts: norms on query and key; normalized expert weights if configured."""

from __future__ import annotations

from kiln.engine.models.experts import read_experts, sparse_layers
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits
from kiln.engine.models.windows import constant_windows


def traits(fields: Fields) -> Traits:
    """Read what differs from the plain decoder. Raises ModelError."""
    bias = fields.flag("attention_bias")
    return Traits(
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        # transformers reads neither max_window_layers nor layer_types here.
        windows=constant_windows(fields) if fields.flag("use_sliding_window") else (),
        experts=read_experts(
            fields,
            # transformers 5 reads either name, and writes the second.
            "num_experts" if "num_experts" in fields else "num_local_experts",
            "moe_intermediate_size",
            layers=sparse_layers(fields),
            renormalise=fields.flag("norm_topk_prob"),
        ),
    )


FAMILY = Family(
    architectures=("Qwen3MoeForCausalLM",),
    traits=traits,
    model_type="qwen3_moe",
    keys={
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": None,
        "num_experts": None,
        "num_local_experts": None,
        "num_experts_per_tok": None,
        "moe_intermediate_size": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "norm_topk_prob": False,
        "num_key_value_heads": 4,
        "use_qk_norm": None,  # transformers ignores it: Qwen3 always has the norms
    },
)
