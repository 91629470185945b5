"""Real config.json files are read whole; a key that Kiln does not read is refused."""

from __future__ import annotations

import json

import pytest
import torch
from family_fields import needed_fields

from kiln.engine.errors import ModelError
from kiln.engine.kv.shape import Window
from kiln.engine.models.registry import known_families, read_model

LLAMA_2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
LLAMA_3_1 = {
    **LLAMA_2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "vocab_size": 128256,
}
TINYLLAMA = {
    **LLAMA_2,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 2048,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "attention_bias": False,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {
    **LLAMA_2,
    "_attn_implementation_autoset": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_0_1 = {
    "architectures": ["MistralForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
MIXTRAL = {
    **MISTRAL_0_1,
    "architectures": ["MixtralForCausalLM"],
    "attention_dropout": 0.0,
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN2_5 = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
SMALL_QWEN = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 131072,
    "max_window_layers": 24,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
DISTILLED = {
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 21,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "use_mrope": False,
    "vocab_size": 151936,
}
QWEN3 = {
    **QWEN2_5,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rope_scaling": None,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
QWEN3_MOE = {
    **QWEN3,
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}
QWEN1_5_MOE = {
    **QWEN2_5,
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "vocab_size": 151936,
}
VICUNA = {
    **LLAMA_2,
    "max_length": 4096,
    "pad_token_id": 0,
    "rope_scaling": {"factor": 4.0, "type": "linear"},
}
MODELS = {  # config.json, the longest context, the dimensions of a head, the window of layer 0
    "Llama-2-7b-hf": (LLAMA_2, 4096, 128, None),
    "vicuna-7b-v1.5-16k": (VICUNA, 16384, 128, None),
    "Llama-3.1-8B-Instruct": (LLAMA_3_1, 131072, 128, None),
    "TinyLlama-1.1B-Chat-v1.0": (TINYLLAMA, 2048, 64, None),
    "SmolLM2-135M-Instruct": (SMOLLM2, 8192, 64, None),
    "Mistral-7B-v0.1": (MISTRAL_0_1, 32768, 128, 4096),
    "Mistral-7B-Instruct-v0.3": (
        {**MISTRAL_0_1, "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32768},
        *(32768, 128, None),
    ),
    "Mixtral-8x7B-Instruct-v0.1": (MIXTRAL, 32768, 128, None),
    "Qwen2.5-7B-Instruct": (QWEN2_5, 32768, 128, None),
    "Qwen2-0.5B": ({**QWEN2_5, **SMALL_QWEN}, 131072, 64, None),
    "DeepSeek-R1-Distill-Qwen-1.5B": ({**QWEN2_5, **DISTILLED}, 131072, 128, None),
    "Qwen3-0.6B": (QWEN3, 40960, 128, None),
    "Qwen3-30B-A3B": (QWEN3_MOE, 40960, 128, None),
    "Qwen1.5-MoE-A2.7B": (QWEN1_5_MOE, 8192, 128, None),
}


def read(folder, content):
    (folder / "config.json").write_text(json.dumps(content))
    return read_model(folder)[1]


@pytest.mark.parametrize("name", MODELS)
def test_the_config_of_a_real_model_is_read(tmp_path, name):
    content, reach, head_dim, window = MODELS[name]
    config = read(tmp_path, content)
    assert (config.max_positions, config.head_dim) == (reach, head_dim)
    assert config.windows == (window and Window(window),) * content["num_hidden_layers"]
    assert config.dtype == getattr(torch, content["torch_dtype"])
    assert config.rope.theta == content.get("rope_theta", 10000.0)


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_writes_for_it_reads_the_same(tmp_path, name):
    """transformers 5 writes ``rope_parameters``, ``dtype``, ``layer_types`` and ``head_dim``."""
    import transformers

    content = MODELS[name][0]
    expected = read(tmp_path, content)
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in written
    assert "dtype" in written
    assert read_model(tmp_path)[1] == expected


@pytest.mark.parametrize("architecture", sorted(known_families()))
def test_every_key_of_the_config_class_is_known(tmp_path, architecture):
    import transformers

    first = known_families()[architecture].architectures[0]  # transformers has no older name
    config = getattr(transformers, first).config_class()
    content = {
        **config.to_dict(),
        **needed_fields(architecture, config.num_hidden_layers),
        **{"architectures": [architecture], "tie_word_embeddings": True, "use_cache": True},
        **{"output_attentions": True, "output_hidden_states": True, "attention_dropout": 0.5},
    }
    assert read(tmp_path, content).tie_word_embeddings


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (QWEN2_5, "dual_chunk_attention_config", {"chunk_size": 262144}),
        (QWEN2_5, "attention_bias", True),
        (QWEN3, "num_nextn_predict_layers", 1),
        (LLAMA_2, "attn_logit_softcapping", 50.0),
        (LLAMA_2, "final_logit_softcapping", 30.0),
        (LLAMA_2, "compression_config", {"quant_method": "compressed-tensors"}),
        (LLAMA_2, "rope_interleaved", True),
        (LLAMA_2, "rope_condense_ratio", 8),
        (LLAMA_2, "sliding_window", 4096),
        (LLAMA_2, "use_sliding_window", True),
        (LLAMA_2, "per_layer_config", {"0": {"hidden_act": "gelu"}}),
        (LLAMA_2, "is_encoder_decoder", True),
        (LLAMA_2, "residual_multiplier", 0.22),
        (LLAMA_2, "use_qk_norm", True),
        (LLAMA_2, "qk_layernorm", True),
        (MISTRAL_0_1, "attention_bias", True),
        (MIXTRAL, "num_experts", 4),
        (QWEN3_MOE, "shared_expert_intermediate_size", 64),
        (QWEN1_5_MOE, "attention_bias", True),
    ],
)
def test_a_key_that_is_not_read_is_refused_unless_it_is_off(tmp_path, base, key, value):
    assert read(tmp_path, {**base, key: None}) == read(tmp_path, {**base, key: type(value)()})
    with pytest.raises(ModelError) as caught:
        read(tmp_path, {**base, key: value})
    message = str(caught.value)
    assert f"config.json: {key} is {value!r}, Kiln does not support this key" in message
    assert base["architectures"][0] in message
    assert "\n" not in message


def test_keys_with_an_underscore_in_front_are_ignored(tmp_path):
    private = {"_model_name_or_path": "x", "_any": {"a": 1}}
    rope = {"type": "linear", "factor": 2.0}
    plain = read(tmp_path, {**LLAMA_2, "rope_scaling": rope})
    assert read(tmp_path, {**LLAMA_2, **private, "rope_scaling": {**rope, **private}}) == plain


@pytest.mark.parametrize("base", [QWEN3, QWEN3_MOE], ids=["Qwen3", "Qwen3-Coder"])
@pytest.mark.parametrize("value", [True, False])
def test_qwen3_norms_query_and_key_whatever_use_qk_norm_is(tmp_path, base, value):
    """As in transformers, whose Qwen3 does not read the key."""
    config = read(tmp_path, {**base, "use_qk_norm": value})
    assert config == read(tmp_path, base)
    assert config.traits.qk_norm


def test_layer_types_that_say_what_the_model_does_pass(tmp_path):
    full = ["full_attention"] * 32
    assert read(tmp_path, {**LLAMA_2, "layer_types": full}) == read(tmp_path, LLAMA_2)
    with pytest.raises(ModelError, match="layer_types"):
        read(tmp_path, {**LLAMA_2, "layer_types": ["sliding_attention", *full[1:]]})
