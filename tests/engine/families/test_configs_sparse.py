"""Config values of families with experts that Kiln does not serve are refused by name."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tiny.model import all_tiny

from kiln.engine.errors import ModelError
from kiln.engine.kv.shape import Window
from kiln.engine.layers.query_scale import QueryScaling
from kiln.engine.models.registry import read_model
from kiln.jit_kernels.ops.rotary.table import RopeScaling


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a tiny model's config.json with changes."""

    def read(name, **changes):
        import transformers
        from greedy_models import COMMON

        one = all_tiny()[name]
        content = getattr(transformers, one.config)(**{**COMMON, **one.fields}).to_dict()
        known = transformers.AutoModelForCausalLM._model_mapping
        content["architectures"] = [known[getattr(transformers, one.config)].__name__]
        content = {**content, "dtype": "float32", **changes}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_model(tmp_path)[1]

    return read


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gpt-oss", {"sliding_window": None}, "sliding_window is None, but layers are sliding"),
        ("gpt-oss", {"swiglu_limit": -1}, "swiglu_limit is -1, want a number above 0"),
        ("gpt-oss", {"layer_types": ["chunked_attention"] * 3}, "layer_types is .*, want one of"),
        ("gpt-oss", {"num_experts": 4}, "num_experts is 4, Kiln does not support this key"),
        ("glm4-moe", {"n_group": 3}, "n_group is 3, want a divisor of 8 experts"),
        ("glm4-moe", {"n_shared_experts": 0}, "n_shared_experts is 0, want an integer of 1"),
        ("glm4-moe", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("llama4", {"attention_chunk_size": None}, "attention_chunk_size is None, but layers are"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types is .*, want one of"),
        ("llama4", {"no_rope_layers": [1, 0, 2, 1]}, "no_rope_layers is .* want 0 or 1 for each"),
        ("llama4", {"moe_layers": [-1]}, "moe_layers is .*, want a list of integers"),
        ("llama4", {"moe_layers": None, "interleave_moe_layer_step": 0}, "layer_step is 0, want"),
        ("llama4", {"intermediate_size_mlp": "2"}, "intermediate_size_mlp is '2', want an integer"),
        ("llama4", {"intermediate_size": "2"}, "intermediate_size is '2', want an integer"),
        ("ernie4_5-moe", {"use_bias": True}, "use_bias is True, but Kiln has no bias of the LM"),
        ("ernie4_5-moe", {"moe_k": 7}, "moe_k is 7, want at most 6"),
        ("ernie4_5-moe", {"moe_layer_end_index": -2}, "moe_layer_end_index is -2, want"),
        ("minimax-m2", {"rotary_dim": 7}, "rotary_dim is 7, want an even number of the 20"),
    ],
    ids=str,
)
def test_a_value_that_cannot_be_served_is_named(read, name, changes, message):
    with pytest.raises(ModelError, match=message):
        read(name, **changes)


def test_layers_without_rotation_have_growing_queries_and_see_everything(read):
    config = read("llama4", layer_types=None, attn_temperature_tuning=4)
    chunk, growing = Window(7, chunked=True), QueryScaling(0.1, 6, shift=1, rounds=False)
    assert config.windows == (chunk, chunk, chunk, None)
    assert config.query_scalings == (None, None, None, growing)
    assert [rope is None for rope in config.ropes] == [False, False, False, True]
    assert not any(read("llama4", attn_temperature_tuning=0).query_scalings)
    assert growing.table(3, torch.bfloat16).dtype == torch.float32
    assert replace(growing, rounds=True).table(3, torch.bfloat16).dtype == torch.bfloat16


def test_yarn_is_the_default_of_gpt_oss_alone_where_nothing_is_said(read):
    def scaling(**rope):
        return read("gpt-oss", **rope).rope.scaling

    yarn = RopeScaling("yarn", 32.0, 4096, truncate=False)
    older = {"rope_type": "linear", "factor": 2.0}
    assert scaling(rope_parameters=None) == yarn
    assert scaling(rope_parameters=None, rope_scaling={}) == yarn
    assert scaling(rope_parameters={}) is None
    assert scaling(rope_parameters=None, rope_scaling=older) == RopeScaling("linear", 2.0)


def test_some_layers_have_experts(read):
    def layers(name, **changes):
        return read(name, **changes).traits.experts.layers

    assert layers("glm4-moe", first_k_dense_replace=2) == (False, False, True)
    assert layers("llama4", moe_layers=None) == (False, True, False, True)
    assert layers("llama4", moe_layers=[]) == (False,) * 4
    assert layers("ernie4_5-moe") == (False, True, True)
    last = {"moe_layer_start_index": 0, "moe_layer_end_index": 1}
    assert layers("ernie4_5-moe", **last) == (True, True, False)
    assert layers("ernie4_5-moe", moe_layer_interval=2) == (False, True, False)
