"""config.json in the layouts that are out there, and a complaint that names the field."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import torch
from family_fields import needed_fields
from safetensors.torch import save_file

from kiln.engine.errors import ModelError
from kiln.engine.kv.shape import Window
from kiln.engine.models.costs import count_parameters
from kiln.engine.models.kernel_needs import kernel_needs
from kiln.engine.models.registry import known_families, read_model
from kiln.jit_kernels.ops.rotary.table import RopeScaling
from kiln.jit_kernels.registry import find_spec

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 1000,
}


def windows(*sizes):
    """Return sliding windows of some sizes; None: no window."""
    return tuple(size and Window(size) for size in sizes)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")


@pytest.fixture
def read(tmp_path):
    def read(architecture="Llama", **fields):
        named = {"architectures": [f"{architecture}ForCausalLM"]}
        content = {**BASE, **named, **fields}
        content = {name: value for name, value in content.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(content))
        return read_model(tmp_path)[1]

    return read


def test_what_a_llama_config_may_leave_out(read):
    config = read(num_key_value_heads="absent")
    assert (config.num_kv_heads, config.head_dim, config.norm_eps) == (8, 8, 1e-6)
    assert (config.activation, config.tie_word_embeddings) == ("silu", False)
    assert (config.rope.theta, config.rope.scaling) == (10_000.0, None)
    assert config.windows == (None, None, None)
    assert config.max_positions == 1000
    assert config.dtype == torch.float32


@pytest.mark.parametrize("architecture", sorted(known_families()))
def test_an_absent_key_means_what_transformers_writes(read, architecture):
    import transformers

    newest = known_families()[architecture].architectures[0]
    config_class = getattr(transformers, newest).config_class
    sizes = {name: value for name, value in BASE.items() if name in SIZES} | {"hidden_size": 512}
    sizes["num_attention_heads"] = 32
    sizes |= dict.fromkeys(set(NEEDED_BY_EXPERTS) & set(config_class().to_dict()), 2)
    sizes |= needed_fields(architecture, BASE["num_hidden_layers"])
    written = config_class(**sizes).to_dict()
    absent = dict.fromkeys(set(BASE) - set(sizes), "absent")
    named = {"architectures": [architecture]}
    assert read(**{**absent, **sizes, **named}) == read(**{**absent, **written, **named})
    assert known_families()[architecture].model_type == config_class.model_type


def test_null_counts_as_absent(read):
    nulls = dict.fromkeys(
        ["head_dim", "num_key_value_heads", "rope_scaling", "rms_norm_eps", "quantization_config"]
    )
    assert read(**nulls) == read()


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
    ],
)
def test_the_dtype_has_two_names(read, fields, dtype):
    assert read(**fields).dtype == dtype


def test_rope_of_transformers_4_and_5_reads_the_same(read):
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 500,
    }
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    assert new == old
    assert new.rope.theta == 5e5
    assert new.rope.scaling == RopeScaling("llama3", 8.0, 500, 1.0, 4.0)
    older = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2})
    assert older.rope.scaling == RopeScaling("linear", 2.0)


def test_a_default_rope_may_stand_in_rope_parameters(read):
    rope = read(rope_parameters={"rope_type": "default", "rope_theta": 77}).rope
    assert (rope.theta, rope.scaling) == (77.0, None)


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        ({"type": "linear", "factor": 4.0}, 4000),  # vicuna-7b-v1.5-16k
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "yarn", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}, 2000),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 500}, 750),
        ({"rope_type": "yarn", "original_max_position_embeddings": 500}, 1000),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4},
            1000,
        ),
    ],
    ids=str,
)
def test_the_reach_is_that_of_vllm(read, scaling, reach):
    assert read(rope_scaling=scaling).max_positions == reach


def test_a_shorter_length_of_the_training_limits_the_reach(read):
    assert read(max_sequence_length=400).max_positions == 400
    assert read(max_seq_length=2000).max_positions == 1000


def test_yarn_reads_every_field_it_has(read):
    fields = {
        "factor": 4.0,
        "original_max_position_embeddings": 250,
        "beta_fast": 20,
        "beta_slow": 2,
        "attention_factor": 1.5,
        "mscale": 0.7,
        "mscale_all_dim": 0.8,
        "truncate": False,
    }
    scaling = read(rope_scaling={"rope_type": "yarn", **fields}).rope.scaling
    assert {name: getattr(scaling, name) for name in fields} == fields


def test_a_part_of_each_head_is_rotated_in_no_model(read):
    """transformers ignores partial_rotary_factor for rope type default, and fails for others."""
    for fields in (
        {"partial_rotary_factor": 0.5},
        {"rope_parameters": {"partial_rotary_factor": 1}},
    ):
        assert read(**fields).rope == read().rope
    linear = {"type": "linear", "factor": 2.0}
    assert read(rope_scaling={**linear, "partial_rotary_factor": 1.0}) == read(rope_scaling=linear)
    for fields in (
        {"rope_scaling": linear, "partial_rotary_factor": 0.5},
        {"rope_scaling": {**linear, "partial_rotary_factor": 0.5}},
    ):
        with pytest.raises(ModelError, match=r"partial_rotary_factor is 0\.5, .* rope type linear"):
            read(**fields)
    with pytest.raises(ModelError, match=r"head_dim is 15, want an even number"):
        read(head_dim=15)


def test_the_attention_factor_under_another_name_is_ignored_as_in_transformers(read):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}
    assert read(rope_scaling={**yarn, "attn_factor": 0.878}) == read(rope_scaling=yarn)


def test_the_model_type_stands_for_a_missing_architecture(read):
    for family, extra in (("Llama", {}), ("Qwen2", {}), ("Qwen3Moe", QWEN), ("Mixtral", MIXTRAL)):
        kind = {"Qwen3Moe": "qwen3_moe"}.get(family, family.lower())
        for empty in ("absent", None, []):
            fields = {**extra, "architectures": empty, "model_type": kind}
            assert read(family, **fields) == read(family, **extra, model_type=kind)
    with pytest.raises(ModelError, match=r"architectures is None, .*model_type is 'gpt2'"):
        read(architectures=None, model_type="gpt2")
    with pytest.raises(ModelError, match=r"architectures is \['BertModel'\]"):
        read(architectures=["BertModel"], model_type="llama")


def test_a_missing_dtype_is_that_of_the_weights(read, tmp_path):
    def dtype(**tensors):
        save_file(tensors, tmp_path / "model.safetensors")
        return read().dtype

    half, whole = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    assert dtype(a=half, b=torch.ones(2, dtype=torch.int8)) == torch.bfloat16
    assert dtype(a=half, b=whole) == torch.float32
    assert dtype(a=whole.half()) == torch.float16
    assert dtype(a=whole.double()) == torch.float32  # Kiln computes in no wider dtype
    assert dtype(a=torch.ones(2, dtype=torch.int8)) == torch.float32
    assert read(dtype="float16").dtype == torch.float16


def test_heads_may_be_wider_than_the_hidden_size_gives(read):
    assert read(head_dim=128).head_dim == 128
    assert read(num_attention_heads=7, num_key_value_heads=7, head_dim=10).head_dim == 10
    with pytest.raises(ModelError, match=r"hidden_size is 64, want a multiple of 7 heads"):
        read(num_attention_heads=7, num_key_value_heads=7)


@pytest.mark.parametrize("architecture", ["Qwen2", "Qwen3"])
def test_qwen_ignores_its_window_unless_switched_on(read, architecture):
    window = {"sliding_window": 32, "max_window_layers": 1}
    assert read(architecture, **window).windows == (None, None, None)
    on = {"use_sliding_window": True, **window}
    assert read(architecture, **on).windows == windows(None, 32, 32)
    silent = {"use_sliding_window": True, "max_window_layers": 2}
    assert read(architecture, **silent).windows == windows(None, None, 4096)
    assert read(architecture, **{**on, "max_window_layers": 0}).windows == windows(32, 32, 32)
    types = ["sliding_attention", "full_attention", "full_attention"]
    assert read(architecture, **on, layer_types=types).windows == windows(32, None, None)
    for wrong in (types[:2], ["chunked_attention"] * 3):
        with pytest.raises(ModelError, match="layer_types"):
            read(architecture, **on, layer_types=wrong)
    with pytest.raises(ModelError, match="layer_types"):
        read(architecture, **window, layer_types=types)


@pytest.mark.parametrize("moe", ["Qwen2Moe", "Qwen3Moe"])
@pytest.mark.parametrize("bound", [0, 2, 9])
def test_qwen_with_experts_has_its_own_rule_for_windows(read, moe, bound):
    """Qwen2-MoE: even layers before max_window_layers. Qwen3-MoE: every layer."""
    import transformers

    fields = {"sliding_window": 32, "max_window_layers": bound, "num_hidden_layers": 5}
    experts = {**QWEN, "shared_expert_intermediate_size": 40}
    if moe == "Qwen3Moe":
        del experts["shared_expert_intermediate_size"]
    assert read(moe, **experts, **fields).windows == (None,) * 5
    theirs = getattr(transformers, f"{moe}Config")(**fields, use_sliding_window=True)
    types = getattr(theirs, "layer_types", ["sliding_attention"] * 5)
    expected = windows(*(32 if kind == "sliding_attention" else None for kind in types))
    fields["use_sliding_window"] = True
    assert read(moe, **experts, **fields).windows == expected
    assert read(moe, **experts, **fields, layer_types=types).windows == expected


def test_mistral_slides_in_every_layer_where_it_has_a_window(read):
    assert read("Mistral", sliding_window=16).windows == windows(16, 16, 16)
    assert read("Mistral", sliding_window=None).windows == (None, None, None)
    assert read("Mistral").windows == windows(4096, 4096, 4096)  # transformers' default
    with pytest.raises(ModelError, match="layer_types"):
        read("Mistral", sliding_window=16, layer_types=["full_attention"] * 3)


NEEDED_BY_EXPERTS = (
    *("num_local_experts", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
QWEN = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 24}


def test_a_mixture_of_experts_says_which_layers_have_them(read):
    mixtral = read("Mixtral", **MIXTRAL, sliding_window=16)
    assert mixtral.windows == windows(16, 16, 16)
    assert read("Mixtral", **MIXTRAL).windows == (None, None, None)
    experts = mixtral.traits.experts
    assert (experts.num_experts, experts.top_k, experts.intermediate_size) == (8, 2, 96)
    assert (experts.layers, experts.routing.renormalise, experts.shared_size) == (
        (True,) * 3,
        True,
        0,
    )

    qwen = read("Qwen3Moe", **QWEN, decoder_sparse_step=2, mlp_only_layers=[5]).traits
    assert qwen.qk_norm
    assert (qwen.experts.layers, qwen.experts.routing.renormalise) == ((False, True, False), False)
    assert qwen.experts.intermediate_size == 24
    assert read("Qwen3Moe", **QWEN, mlp_only_layers=[1]).traits.experts.layers == (
        True,
        False,
        True,
    )
    assert read("Qwen3Moe", **QWEN, norm_topk_prob=True).traits.experts.routing.renormalise
    old = read("Qwen2Moe", **QWEN, shared_expert_intermediate_size=40, sliding_window=0).traits
    assert (old.qkv_bias, old.experts.shared_size, old.windows) == (True, 40, ())


def test_a_model_needs_the_routing_of_as_many_experts_as_it_has(read):
    def variants(config):
        needs = kernel_needs(config, torch.bfloat16, torch.bfloat16)
        assert not find_spec("route_tokens").lacking(needs)
        return [tuple(one.values()) for one in find_spec("route_tokens").variants(needs)]

    assert variants(read("Mixtral", **MIXTRAL)) == [("kiln::bf16", "256")]
    assert variants(read("Qwen3Moe", **{**QWEN, "num_experts": 257})) == [("float", "512")]
    mixtral = read("Mixtral", **MIXTRAL)
    experts = replace(mixtral.traits.experts, router_in_float32=True)
    wide = replace(mixtral, traits=replace(mixtral.traits, experts=experts))
    assert variants(wide) == [("float", "256")]


def test_a_shared_expert_without_a_gate_has_fewer_weights(read):
    qwen = read("Qwen2Moe", **QWEN, shared_expert_intermediate_size=40)
    experts = replace(qwen.traits.experts, shared_gate=False)
    plain = replace(qwen, traits=replace(qwen.traits, experts=experts))
    assert count_parameters(qwen) - count_parameters(plain) == 3 * qwen.hidden_size


def test_a_model_needs_the_attention_kernels_of_its_soft_caps(read):
    config, prefill = read("Mistral", head_dim=128), find_spec("paged_prefill")

    def variants(config):
        needs = kernel_needs(config, torch.bfloat16, torch.bfloat16)
        assert not prefill.lacking(needs)
        return {one["soft_cap"] for one in prefill.variants(needs)}

    assert config.soft_caps == (0.0, 0.0, 0.0)
    assert variants(config) == {"false"}
    capped = replace(config, traits=replace(config.traits, soft_cap=50.0))
    assert capped.soft_caps == (50.0, 50.0, 50.0)
    assert variants(capped) == {"true"}


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("Mixtral", {"num_experts_per_tok": 2}, "num_local_experts is missing"),
        ("Mixtral", {"num_local_experts": 8}, "num_experts_per_tok is missing"),
        ("Mixtral", {**MIXTRAL, "num_local_experts": 513}, "is 513, want at most 512"),
        ("Mixtral", {**MIXTRAL, "num_experts_per_tok": 9}, "is 9, want at most 8"),
        ("Mixtral", {**MIXTRAL, "hidden_act": "relu2"}, "'relu2', Kiln supports silu, gelu,"),
        ("Qwen3Moe", {**QWEN, "num_experts_per_tok": 33}, "is 33, want at most 32"),
        (
            "Qwen3Moe",
            {**QWEN, "mlp_only_layers": [-1]},
            r"mlp_only_layers is \[-1\], want a list of",
        ),
        ("Qwen3Moe", {**QWEN, "mlp_only_layers": 1}, "mlp_only_layers is 1, want a list of"),
        ("Qwen2Moe", QWEN, "shared_expert_intermediate_size is missing"),
    ],
    ids=str,
)
def test_experts_that_cannot_be_served_are_named(read, architecture, fields, message):
    with pytest.raises(ModelError, match=message):
        read(architecture, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"vocab_size": 0}, "vocab_size is 0, want an integer of 1 or more"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3', want an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, want a divisor of 8"),
        ({"rms_norm_eps": -1}, "rms_norm_eps is -1, want a number above 0"),
        ({"tie_word_embeddings": "yes"}, "want true or false"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', Kiln supports silu"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype is 'float8_e4m3fn'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method is missing"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            r"rope_scaling\.rope_type is 'dynamic', Kiln supports default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"rope_scaling\.type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        (
            {"rope_scaling": {"rope_type": "default", "type": "mrope"}},
            r"rope_scaling\.type is 'mrope', but rope_type is 'default'",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1.0]}},
            r"rope_scaling\.short_factor is \[1\.0\], Kiln does not support this key for rope type",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            r"rope_parameters\.full_attention is \{'rope_type': 'default'\}",
        ),
        (
            {"rope_parameters": {"rope_theta": 1.0}, "rope_scaling": {"type": "default"}},
            "rope_scaling is {'type': 'default'}, but rope_parameters is also set",
        ),
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"architectures is \['GPT2LMHeadModel'\], Kiln se",
        ),
        ({"architectures": "absent"}, "architectures is None, and model_type is ''"),
        ({"architectures": "Llama"}, "architectures is 'Llama', want a list"),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_served_is_named_with_its_file(read, tmp_path, fields, message):
    with pytest.raises(ModelError, match=message) as caught:
        read(**fields)
    assert str(tmp_path) in str(caught.value) or "dimensions" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_config_is_not_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        read_model(tmp_path)


def test_every_promised_family_is_there():
    promised = {"Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe"}
    assert {f"{name}ForCausalLM" for name in promised} <= set(known_families())


def test_a_new_family_is_one_new_file(read, tmp_path, monkeypatch):
    from kiln.engine.models import families

    (tmp_path / "trial.py").write_text(
        '"""A trial."""\n'
        "from kiln.engine.models.family import Family\n"
        "from kiln.engine.models.hf_config import Traits\n"
        "from kiln.engine.models.families.llama import Block\n"
        'FAMILY = Family(("TrialForCausalLM",), lambda fields: Traits(qkv_bias=True), Block)\n'
    )
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    known_families.cache_clear()
    try:
        assert read("Trial").traits.qkv_bias
    finally:
        known_families.cache_clear()
        del sys.modules[f"{families.__name__}.trial"]
