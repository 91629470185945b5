"""What config.json of Phi-3 and Phi-4 may say, and what is refused."""

from __future__ import annotations

import json

import pytest
from tiny.phi3 import LISTS

from kiln.engine.errors import ModelError
from kiln.engine.models.registry import read_model
from kiln.jit_kernels.ops.rotary.table import RopeScaling

BASE = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 640,
    "original_max_position_embeddings": 80,
}
SCALING = RopeScaling(
    "longrope",
    8.0,
    80,
    short_factor=tuple(LISTS["short_factor"]),
    long_factor=tuple(LISTS["long_factor"]),
)


@pytest.fixture
def read(tmp_path):
    def read(**fields):
        (tmp_path / "config.json").write_text(json.dumps({**BASE, **fields}))
        return read_model(tmp_path)[1]

    return read


def test_longrope_has_three_names_and_two_places(read):
    new = read(rope_parameters={"rope_type": "longrope", "rope_theta": 500.0, **LISTS})
    assert (new.rope.theta, new.rope.dim, new.rope.scaling) == (500.0, 16, SCALING)
    for names in (
        {"type": "longrope"}, {"type": "su"}, {"type": "yarn"}, {"rope_type": "su"},
        {"rope_type": "longrope", "type": "su"},  # transformers 5 saves "su" so
    ):  # fmt: skip
        assert read(rope_theta=500.0, rope_scaling={**names, **LISTS}) == new
    ignored = {"short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 7}
    kept = read(rope_theta=500.0, rope_scaling={"type": "su", **LISTS, **ignored})
    assert kept.rope == new.rope


def test_the_longest_requests_need_the_long_list_unless_none_can_be_so_long(read):
    config = read(rope_scaling={"type": "longrope", **LISTS})
    assert config.max_positions == 640
    assert [config.long_start(length) for length in (640, 81, 80, 10)] == [80, 80, 0, 0]
    assert read().long_start(640) == 0


@pytest.mark.parametrize("dim", [16, 12])
def test_the_lists_have_a_number_for_each_frequency(read, dim):
    lists = {name: values[: dim // 2] for name, values in LISTS.items()}
    fields = {"rope_scaling": {"type": "longrope", **lists}, "partial_rotary_factor": dim / 16}
    assert read(**fields).rope.dim == dim
    with pytest.raises(ModelError, match=rf"long_factor is \[.*want {dim // 2} numbers"):
        read(**{**fields, "rope_scaling": {**fields["rope_scaling"], "long_factor": [1.0]}})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"'linear', Kiln supports default, l",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "type": "default", **LISTS}}, r"rope_type is"),
        ({"rope_scaling": {"type": "su"}}, r"rope_scaling\.short_factor is None, want 8 numbers"),
        (
            {"rope_scaling": {"type": "su", **LISTS, "short_factor": [1.0] * 7 + [0]}},
            r"short_factor is .* want a list of numbers above 0, but it has 0",
        ),
        (
            {"rope_scaling": {"type": "su", **LISTS}, "original_max_position_embeddings": 1},
            r"original_max_position_embeddings is .*: want 2 tokens or more",
        ),
        ({"rope_scaling": {"type": "su", **LISTS, "beta_fast": 3}}, r"beta_fast is 3, Kiln does"),
        ({"attention_bias": True}, r"attention_bias is True, Kiln does not support this key"),
        ({"partial_rotary_factor": 0.2}, r"partial_rotary_factor is 0.2, want one with which"),
    ],
    ids=str,
)
def test_what_is_refused_is_named(read, fields, message):
    with pytest.raises(ModelError, match=message):
        read(**fields)
