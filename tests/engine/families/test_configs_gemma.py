"""config.json of Gemma: published files are read whole, and what Kiln cannot serve is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from kiln.engine.config import ModelConfig
from kiln.engine.errors import ModelError
from kiln.engine.kv.shape import Window
from kiln.engine.models.registry import read_model
from kiln.engine.text.vocabulary import vocabulary_of
from kiln.jit_kernels.ops.rotary.table import RopeScaling

GEMMA_2_27B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 107],
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "initializer_range": 0.02,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": None,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


@pytest.fixture
def read(tmp_path):
    def read(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_model(tmp_path)[1]

    return read


def test_gemma_2(read):
    config, traits = read(GEMMA_2_27B), read(GEMMA_2_27B).traits
    assert config.windows == (Window(4096), None) * 23
    assert (traits.scale, traits.soft_cap, traits.logit_soft_cap) == (1 / 12, 50.0, 30.0)
    assert (config.head_dim, config.activation) == (128, "gelu_pytorch_tanh")
    assert traits.embedding_scale == 4608**0.5
    assert config.tie_word_embeddings
    assert traits.overflows_float16


def test_gemma_3(read):
    config = read(GEMMA_3_1B)
    assert config.windows[:7] == (*(Window(512),) * 5, None, Window(512))
    assert config.windows[24:] == (Window(512),) * 2  # they do not fill a pattern
    assert [rope.theta for rope in config.ropes[4:6]] == [1e4, 1e6]
    assert config.max_positions == 32768
    assert (config.traits.soft_cap, config.traits.logit_soft_cap) == (0.0, 0.0)
    assert config.traits.overflows_float16
    assert not config.image_token_ids


def test_gemma_3_with_images_leaves_out_what_has_its_default(read):
    config = read(GEMMA_3_4B)
    assert (config.vocab_size, config.head_dim, config.num_layers) == (262208, 256, 34)
    assert (config.num_heads, config.num_kv_heads, config.norm_eps) == (8, 4, 1e-6)
    assert [rope.scaling for rope in config.ropes[4:6]] == [None, RopeScaling("linear", 8.0)]
    # It includes the scaling.
    assert {rope.max_positions for rope in config.ropes} == {config.max_positions} == {131072}
    assert config.dtype == torch.bfloat16
    assert (config.tie_word_embeddings, config.wrapped) == (True, True)
    assert config.image_token_ids == {255999, 256000, 262144}


@pytest.mark.parametrize(("content", "size"), [(GEMMA_3_1B, 262144), (GEMMA_3_4B, 262208)])
def test_a_grammar_may_allow_every_token_of_the_model(tokenizer_folders, tmp_path, content, size):
    """Masks are as long as logits, also if config.json leaves the size to its default."""
    folder = shutil.copytree(tokenizer_folders["byte-level"], tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(content))
    assert vocabulary_of(ModelConfig(str(folder))).vocab_size == size


def test_a_key_of_tokens_for_images_may_have_another_name_or_be_absent(read):
    content = {**GEMMA_3_4B, "image_token_id": 7}
    for name in ("image_token_index", "boi_token_index", "eoi_token_index"):
        del content[name]
    assert read(content).image_token_ids == {7, 255999, 256000}


def test_the_head_of_the_model_with_images_has_no_soft_cap(read):
    """As in transformers."""
    capped = {"final_logit_softcapping": 30.0}
    assert read({**GEMMA_3_1B, **capped}).traits.logit_soft_cap == 30.0
    text = {**GEMMA_3_4B["text_config"], **capped}
    assert read({**GEMMA_3_4B, "text_config": text}) == read(GEMMA_3_4B)


def test_ropes_by_type_of_layer_read_the_same_in_all_their_forms(read):
    older = {**GEMMA_3_1B, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    nested = {name: value for name, value in older.items() if not name.startswith("rope_")}
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    both = {"full_attention": full, "sliding_attention": sliding}
    assert read({**nested, "rope_parameters": both}) == read(older)
    assert read({**nested, "rope_parameters": {"full_attention": full}}) == read(older)


TWO = {"layer_types": ["full_attention"] * 25}
FLAT = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("base", "fields", "message"),
    [
        (GEMMA_2_27B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA_3_1B, {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GEMMA_3_1B, {"sliding_window": None}, "sliding_window is None, but layers are sliding"),
        (GEMMA_2_27B, {"sliding_window": None}, "sliding_window is None, but layers are sliding"),
        (GEMMA_3_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA_3_1B, TWO, r"layer_types is .*want one of sliding_attention, full_attention for"),
        (GEMMA_3_1B, {"rope_parameters": FLAT}, r"rope_parameters\.rope_type is 'default', want"),
        (GEMMA_3_1B, {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        (GEMMA_3_4B, {"text_config": {"model_type": "gemma2"}}, r"text_config\.model_type is 'gem"),
        (GEMMA_3_4B, {"boi_token_index": "x"}, "boi_token_index is 'x'"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_by_name(read, base, fields, message):
    with pytest.raises(ModelError, match=message):
        read({**base, **fields})
