"""What config.json of Mistral-Small-3 and Ministral-3 may say, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from greedy_models import COMMON
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny
from tiny_answers import ask, assert_agrees, draw_prompts, serve

from kiln.engine.errors import ModelError
from kiln.engine.layers.query_scale import QueryScaling
from kiln.engine.models.registry import read_model

INSIDE = "language_model.model.layers.1.self_attn.k_proj.weight"
WRAPPER = {"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16"}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5.0}


@pytest.fixture
def read(tmp_path):
    def read(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_model(tmp_path)[1]

    return read


def ministral3(**rope):
    return {**COMMON, "architectures": ["Ministral3ForCausalLM"], "rope_parameters": rope}


def test_the_type_of_the_text_decides_what_is_served(read):
    for kind, scaled in (("mistral", False), ("ministral3", True)):
        config = read({**WRAPPER, "text_config": {**COMMON, "model_type": kind}})
        assert config.dtype == torch.bfloat16
        assert config.wrapped
        assert (config.query_scalings[0] is not None) == scaled
    for text in ({}, {"model_type": "llama"}):
        with pytest.raises(ModelError, match=r"model_type is .*Kiln serves ministral3, mistral"):
            read({**WRAPPER, "text_config": {**COMMON, **text}})


def test_an_error_names_a_tensor_as_the_files_do(tmp_path):
    all_tiny()["mistral3"].save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[INSIDE] = tensors[INSIDE].to(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"qkv_proj: tensor {INSIDE} is torch.int32"):
        serve(tmp_path)
    del tensors[INSIDE]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf" tensor {INSIDE} is missing"):
        serve(tmp_path)


def test_queries_are_scaled_by_the_original_length(read):
    beta = {"llama_4_scaling_beta": 0.2}
    assert read(ministral3(**YARN)).query_scalings == (None, None)
    found = read(ministral3(**YARN, **beta, original_max_position_embeddings=32))
    assert found.query_scalings == (QueryScaling(0.2, 32),) * 2
    assert found.max_positions == 128
    longest = COMMON["max_position_embeddings"]  # as transformers, for YaRN alone
    assert read(ministral3(**YARN, **beta)).query_scalings[0].period == longest
    with pytest.raises(ModelError, match=r"original_max_position_embeddings is missing"):
        read(ministral3(rope_type="default", **beta))
    with pytest.raises(ModelError, match=r"llama_4_scaling_beta is -1, want a number above 0"):
        read(ministral3(**YARN, llama_4_scaling_beta=-1))


def test_a_head_and_the_files_beside_the_model_s_own(tmp_path):
    """The head of the file is used though config.json ties it; consolidated files are not read."""
    one = all_tiny()["mistral3"]
    model = one.save(tmp_path)
    assert "tie_word_embeddings" not in (tmp_path / "config.json").read_text()
    for name in ("consolidated.safetensors", "params.json"):
        (tmp_path / name).write_bytes(b"not for Kiln")

    def logits(token_ids, total):
        with torch.inference_mode():
            return one.logits(model, token_ids, total)

    assert_agrees(logits, ask(serve(tmp_path), draw_prompts((9,))))
