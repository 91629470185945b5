"""config.json of the dense families: published ones are read whole, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch

from kiln.engine.errors import ModelError
from kiln.engine.kv.shape import Window
from kiln.engine.models.build import Builder
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.registry import read_model

FULL, SLIDING = "full_attention", "sliding_attention"
COMMON = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "initializer_range": 0.02, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "transformers_version": "4.55.0",
}  # fmt: skip
SMOLLM3 = {
    **COMMON, "architectures": ["SmolLM3ForCausalLM"], "hidden_size": 2048,
    "intermediate_size": 11008, "layer_types": [FULL] * 36, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
    "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
    "num_hidden_layers": 36, "num_key_value_heads": 4, "pretraining_tp": 2, "rope_scaling": None,
    "rope_theta": 5e6, "sliding_window": None, "tie_word_embeddings": True,
    "use_sliding_window": False, "vocab_size": 128256,
}  # fmt: skip
OLMO2 = {
    **COMMON, "architectures": ["Olmo2ForCausalLM"], "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "rope_scaling": None, "rope_theta": 500000, "vocab_size": 100352,
}  # fmt: skip
OLMO3 = {
    **OLMO2, "architectures": ["Olmo3ForCausalLM"], "max_position_embeddings": 65536,
    "model_type": "olmo3", "sliding_window": 4096,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8, "vocab_size": 100278,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
GRANITE = {
    **COMMON, "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0, "hidden_size": 4096, "intermediate_size": 12800,
    "logits_scaling": 16.0, "max_position_embeddings": 131072, "mlp_bias": False,
    "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
    "rope_scaling": None, "rope_theta": 1e7, "tie_word_embeddings": True, "vocab_size": 49159,
}  # fmt: skip
GRANITE_4 = {  # granite-4.0-micro
    **GRANITE, "architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.015625,
    "hidden_size": 2560, "init_method": "mup", "intermediate_size": 8192,
    "layer_types": ["attention"] * 40, "logits_scaling": 10, "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 40, "mamba_d_state": 256,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
    "model_type": "granitemoehybrid", "normalization_function": "rmsnorm",
    "num_attention_heads": 40, "num_experts_per_tok": 0, "num_local_experts": 0,
    "output_router_logits": False, "position_embedding_type": "rope",
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192, "vocab_size": 100352,
}  # fmt: skip
SEED = {
    **COMMON, "architectures": ["SeedOssForCausalLM"], "attention_bias": True,
    "attention_dropout": 0.1, "attention_out_bias": False, "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
    "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
    "num_key_value_heads": 8, "residual_dropout": 0.1,
    "rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7, "vocab_size": 155136,
}  # fmt: skip
EXAONE = {
    **COMMON, "architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "hidden_size": 5120,
    "intermediate_size": 27392, "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16,
    "max_position_embeddings": 131072, "model_type": "exaone4", "num_attention_heads": 40,
    "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
    "vocab_size": 102400,
}  # fmt: skip
PUBLISHED = {  # config.json, the longest context, windows and rotating layers of the first four
    "SmolLM3-3B": (SMOLLM3, 65536, "----", "rrr-"),
    "OLMo-2-1124-7B": (OLMO2, 4096, "----", "rrrr"),
    "Olmo-3-7B": (OLMO3, 65536, "www-", "rrrr"),
    "granite-3.3-8b": (GRANITE, 131072, "----", "rrrr"),
    "granite-4.0-micro": (GRANITE_4, 131072, "----", "rrrr"),
    "granite-4.0 without positions": (
        {**GRANITE_4, "position_embedding_type": "nope"}, 131072, "----", "----",
    ),
    "Seed-OSS-36B": (SEED, 524288, "----", "rrrr"),
    "EXAONE-4.0-32B": (EXAONE, 131072, "www-", "rrr-"),
    "EXAONE-4.0-32B without layer types": (
        {**EXAONE, "layer_types": None}, 131072, "www-", "rrr-",
    ),
    "EXAONE-4.0-1.2B": (
        {**EXAONE, "layer_types": [FULL] * 64, "sliding_window": None,
         "sliding_window_pattern": None},
        131072, "----", "rrrr",
    ),
}  # fmt: skip


@pytest.fixture
def read(tmp_path):
    def read(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_model(tmp_path)[1]

    return read


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_whole(read, name):
    content, reach, slides, rotates = PUBLISHED[name]
    config = read(content)
    assert config.max_positions == reach
    windows = tuple(Window(4096) if letter == "w" else None for letter in slides)
    assert config.windows == windows * (config.num_layers // 4)
    assert ["-" if rope is None else "r" for rope in config.ropes[:4]] == [*rotates]
    assert config.rope.theta == content["rope_theta"]


def test_only_full_layers_of_olmo_3_are_stretched(read):
    """Older files have one object for both kinds; one for each kind is served, a flat one not."""
    old = read(OLMO3)
    assert [rope.scaling is None for rope in old.ropes[:4]] == [True, True, True, False]
    rope = {"rope_theta": 500000, **OLMO3["rope_scaling"]}
    kinds = {FULL: {**rope, "truncate": False}, SLIDING: {"rope_type": "default"}}
    silent = {**OLMO3, "rope_scaling": None, "rope_theta": None}
    assert read({**silent, "rope_parameters": kinds}).ropes == old.ropes
    other = read({**OLMO3, "rope_theta": 7e5}).ropes  # as transformers: that of full layers
    assert [rope.theta for rope in other[:4]] == [5e5, 5e5, 5e5, 7e5]
    with pytest.raises(ModelError, match="rope_parameters"):
        read({**silent, "rope_parameters": rope})


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (SMOLLM3, {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\], want 0 or 1 for each"),
        (SMOLLM3, {"no_rope_layers": [2] * 36}, "want 0 or 1 for each of 36 layers"),
        (SMOLLM3, {"no_rope_layers": None, "no_rope_layer_interval": 0}, "interval is 0, want"),
        (SMOLLM3, {"layer_types": [SLIDING] * 36}, "layer_types is"),
        (OLMO2, {"clip_qkv": 8.0}, "clip_qkv is 8.0, Kiln does not support this key"),
        (OLMO3, {"sliding_window": None}, "sliding_window is None, but layers are sliding"),
        (OLMO3, {"layer_types": ["chunked_attention"] * 32}, "layer_types is"),
        (GRANITE, {"attention_multiplier": 0}, "attention_multiplier is 0, want a number above 0"),
        (GRANITE, {"logits_scaling": "8"}, "logits_scaling is '8', want a number"),
        (GRANITE_4, {"num_local_experts": 62}, "experts is 62, Kiln serves this family without"),
        (
            GRANITE_4,
            {"layer_types": ["mamba"] * 40},
            r"layer_types is \['mamba', .* want one of full",
        ),
        (GRANITE_4, {"layer_types": None}, "layer_types is None, want one of full_attention"),
        (GRANITE_4, {"position_embedding_type": "alibi"}, "'alibi', want nope or rope"),
        (SEED, {"attention_out_bias": 1}, "attention_out_bias is 1, want true or false"),
        (
            EXAONE,
            {"layer_types": None, "sliding_window_pattern": "LLX"},
            "sliding_window_pattern is 'LLX', want a number, or letters L and G",
        ),
        (EXAONE, {"layer_types": None, "sliding_window_pattern": 0}, "pattern is 0, want an int"),
        (EXAONE, {"sliding_window": None}, "sliding_window is None, but layers are sliding"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_named(read, base, fields, message):
    with pytest.raises(ModelError, match=message):
        read({**base, **fields})


def test_gemma_rounds_the_factor_of_embeddings_and_granite_does_not(tmp_path, small_config):
    """transformers keeps Gemma's factor in the dtype of the weights, Granite's as a number."""
    for architecture, more, wanted in [
        ("GraniteForCausalLM", {"embedding_multiplier": 12.3}, 12.3),
        ("Gemma3ForCausalLM", {}, torch.tensor(32**0.5, dtype=torch.bfloat16).item()),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(small_config(architecture, **more)))
        config, weights = read_model(tmp_path)[1], DummyWeights(0, torch.bfloat16)
        build = Builder(config, weights, 8, torch.bfloat16, torch.device("cpu"))
        assert build.embedding().factor == wanted
