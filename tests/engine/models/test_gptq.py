"""GPTQ: zero points, orders of inputs, rules for names, and files that say something wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from packers.gptq import packer
from packers.integers import words
from packers.packer import Packed
from quantised_modules import CPU, Module, save
from quantised_modules import config as read
from safetensors.torch import save_file

from kiln.engine.errors import ModelError
from kiln.engine.layers.weight_parts import MixedWeight
from kiln.engine.models import expressions
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.renamed_weights import HeadlessWeights
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.scheme import DENSE, Part
from kiln.engine.models.split import Share, all_of

NAME = "model.layers.0.mlp.gate_proj"
SIZE = (32, 64)
CONFIG = dict(packer("any", group_size=32).config)


def packed(size: tuple[int, int] = SIZE, seed: int = 0, **fields: Any) -> Packed:
    """A module as the fields say; without g_idx if its groups are in order."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(*size, generator=generator, dtype=torch.float64)
    return packer("any", **{"group_size": 32, **fields}).pack(weight, generator)


def module(folder: Any, tensors: Any, size: tuple[int, int] = SIZE, **fields: Any) -> Module:
    """Write a module, and return it as it is read with these fields of quantization_config."""
    save(folder, NAME, tensors)
    return Module(folder, {**CONFIG, **fields}, NAME, size)


def same(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether values are those of the formula, rounded to float32."""
    return torch.allclose(got, wanted, rtol=2**-23, atol=0)


def test_a_zero_of_15_in_version_1_is_16_and_carries_into_no_other(tmp_path):
    zeros = torch.tensor([16, 1, 16, 16, 8, 1, 16, 2]).repeat(4)[:, None]  # [outputs, groups]
    tensors = {
        "qweight": words(torch.full((32, 32), 3), 4).T,
        "qzeros": words(zeros.T - 1, 4),
        "scales": torch.ones(1, 32, dtype=torch.float16),
    }
    values = module(tmp_path, tensors, (32, 32), sym=False).values()
    assert torch.equal(values, (3.0 - zeros).double().expand(32, 32))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("label", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
def test_symmetric_files_tell_their_zeros_by_their_words(tmp_path, bits, label, stored):
    made = packed(bits=bits, checkpoint_format=stored)
    word = {4: (0x77777777, 0x88888888), 8: (0x7F7F7F7F, 0x80808080)}[bits][stored == "gptq_v2"]
    assert made.tensors["qzeros"].unique().item() & 0xFFFFFFFF == word
    own = module(tmp_path, made.tensors, bits=bits, checkpoint_format=label)
    assert same(own.values(), made.weight)
    assert own.read().zeros is None


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda one: one.fill_(0x66666666), "0x66666666"),
        (lambda one: one[1:].fill_(0x08888888) is None or one, "0x08888888"),
        (lambda one: one[:1].fill_(-0x77777778) is None or one, "0x77777777"),  # both versions
    ],
)
def test_symmetric_files_with_other_zeros_are_refused_with_the_word(tmp_path, damage, word):
    tensors = dict(packed().tensors)
    damage(tensors["qzeros"])
    with pytest.raises(ModelError, match=rf"{NAME}\.qzeros has the word {word}, but"):
        module(tmp_path, tensors).read()


def test_a_share_of_outputs_reads_words_that_it_has_a_part_of(tmp_path):
    made = packed(sym=False)
    own = module(tmp_path, made.tensors, sym=False)
    for outputs in (Share(3, 10, 32, 10), Share(31, 1, 32, 8), Share(32, 0, 32, 8)):
        got = own.values(outputs)
        assert same(got[: outputs.size], made.weight[outputs.place])
        assert got.shape == (outputs.room, 64)
        assert not got[outputs.size :].any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 2}, "bits is 2, of GPTQ Kiln supports 4 and 8"),
        ({"bits": 3}, "bits is 3, of GPTQ"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": 0}, "group_size is 0"),
        *(({"checkpoint_format": one}, f"checkpoint_format is '{one}'") for one in ("marlin", "x")),
        ({"format": "bitblas"}, "format is 'bitblas'"),
        ({"format": "gptq_v2"}, "format is 'gptq_v2', but checkpoint_format is 'gptq'"),
        ({"pack_dtype": "int16"}, "pack_dtype is 'int16'"),
        ({"is_marlin_format": True}, "is_marlin_format is True, Kiln does not know"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard', Kiln does not know"),
        ({"sym": "yes"}, "sym is 'yes', want true or false"),
        ({"dynamic": []}, "want an object"),
        ({"dynamic": {"(": {}}}, "dynamic is .* no regular expression"),
        ({"dynamic": {"a": {"bits": 3}}}, "dynamic.a.bits is 3"),
        ({"dynamic": {"a": {"rank": 3}}}, "dynamic.a.rank is 3, Kiln does not know"),
        ({"dynamic": {"a": "skip"}}, "dynamic.a is 'skip', want an object"),
        ({"modules_in_block_to_quantize": [["a"], 3]}, "want a list of strings"),
    ],
    ids=str,
)
def test_what_kiln_does_not_read_is_named(tmp_path, fields, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, {**CONFIG, **fields})


def test_what_was_calibrated_or_how_others_compute_changes_nothing(tmp_path):
    neutral = {
        "static_groups": True, "true_sequential": True, "damp_percent": 0.1, "meta": {"a": 1},
        "act_group_aware": True, "is_marlin_format": False, "model_name_or_path": "x",
        "model_file_base_name": "model", "dataset": "c4", "use_exllama": True,
        "exllama_config": {"version": 1}, "block_name_to_quantize": "model.layers",
    }  # fmt: skip
    assert read(tmp_path, {**CONFIG, **neutral}) == read(tmp_path, CONFIG)


def test_the_file_beside_is_enough_and_must_agree(tmp_path):
    beside = tmp_path / "quantize_config.json"
    own = {name: value for name, value in CONFIG.items() if name != "quant_method"}
    beside.write_text(json.dumps(own))
    assert read(tmp_path, None) == read(tmp_path, CONFIG)
    for fields in ({"desc_act": True}, {"dynamic": {"-:a": {}}}, {"sym": False}, {"lm_head": True}):
        beside.write_text(json.dumps({**own, **fields}))
        with pytest.raises(ModelError, match=r"quantize_config.json says something else"):
            read(tmp_path, CONFIG)
    beside.write_text(json.dumps({**own, "bits": 2}))
    with pytest.raises(ModelError, match=r"quantize_config.json: bits is 2"):
        read(tmp_path, CONFIG)


def test_groups_in_their_order_are_plain_ones(tmp_path):
    for fields in ({"desc_act": True}, {"desc_act": False}, {"desc_act": True, "group_size": -1}):
        plain = packed(**{**fields, "desc_act": False})
        own = module(tmp_path, plain.tensors, **fields)
        assert own.read().group_of is None
        assert same(own.values(), plain.weight)
    without = {name: one for name, one in plain.tensors.items() if name != "g_idx"}
    assert same(module(tmp_path, without, group_size=-1).values(), plain.weight)
    made = dict(packed(desc_act=True).tensors)
    del made["g_idx"]
    with pytest.raises(ModelError, match=rf"{NAME}\.g_idx is missing"):
        module(tmp_path, made, desc_act=True).read()


def test_the_last_group_may_have_fewer_inputs(tmp_path):
    for fields in ({"desc_act": False}, {"desc_act": True}):
        made = packed((32, 96), group_size=64, sym=False, **fields)
        own = module(tmp_path, made.tensors, (32, 96), group_size=64, sym=False, **fields)
        assert same(own.values(), made.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one - 1, "has group -1: want 0 to 1"),
        (lambda one: one + 1, "has group 2: want 0 to 1"),
        (lambda one: one * 0, "has 64 inputs of group 0: want 32, by group_size"),
        (lambda one: one[:-1], r"is I32 \[63\], config.json implies \[64\]"),
        (lambda one: one.float(), "is float32, but"),
    ],
)
def test_orders_that_cannot_be_are_named(tmp_path, change, message):
    tensors = dict(packed(desc_act=True).tensors)
    tensors["g_idx"] = change(tensors["g_idx"])
    with pytest.raises(ModelError, match=rf"{NAME}\.g_idx {message}"):
        module(tmp_path, tensors, desc_act=True).read()


def test_another_order_without_desc_act_is_refused(tmp_path):
    with pytest.raises(ModelError, match=rf"{NAME}\.g_idx has groups in another order, but"):
        module(tmp_path, packed(desc_act=True).tensors).read()


def test_scales_below_0_are_those_of_autoround(tmp_path):
    made = packed(sym=False)
    tensors = {**made.tensors, "scales": -made.tensors["scales"]}
    with pytest.raises(ModelError, match=rf"{NAME}\.scales has the scale -.* 0 or more"):
        module(tmp_path, tensors, sym=False).read()
    own = module(tmp_path, tensors, sym=False, autoround_version="0.5.1")
    assert same(own.values(), -made.weight)


def test_parts_and_experts_keep_orders_of_their_own(tmp_path):
    fields = {"desc_act": True, "sym": False}
    names = [f"model.layers.0.mlp.experts.{e}.{p}_proj" for e in (0, 1) for p in ("gate", "up")]
    made = {name: packed(seed=index, **fields) for index, name in enumerate(names)}
    made[names[2]] = packed(seed=9, **{**fields, "desc_act": False})  # in order, by chance
    stored = packer("any").stored(made)
    save_file(stored, tmp_path / "model.safetensors")
    source = SafetensorsWeights(tmp_path)
    scheme = read(tmp_path, {**CONFIG, **fields}).scheme(names[0], "gate_up_proj", source)
    place = (all_of(32), all_of(64), torch.float32, CPU)
    parts = [Part(source, "l", name, *place) for name in names]
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    experts = scheme.experts(parts, 2)
    got = experts.grouped(x, torch.tensor([4, 6], dtype=torch.int32), torch.arange(6) // 4)
    for rows, pair in ((slice(4), names[:2]), (slice(4, 6), names[2:])):
        weight = torch.cat([made[name].weight for name in pair]).float()
        torch.testing.assert_close(got[rows], x[rows] @ weight.T, rtol=1e-5, atol=1e-5)
    layer = scheme.linear(parts[:2])
    assert isinstance(layer, MixedWeight)
    out = torch.empty(6, 64)
    layer.product(x, out, None)
    weight = torch.cat([made[name].weight for name in names[:2]]).float()
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-5, atol=1e-5)


def test_rules_are_tried_in_their_order_from_the_start_of_a_name(tmp_path):
    rules = {
        "-:.*attn.*": {},
        "gate_proj": {"bits": 8},  # no name begins so
        r"+:.*\.0\..*down": {"bits": 8, "group_size": 64},
        ".*down": {"sym": False},
        r"model\.layers\.1": {},
    }
    quantization = read(tmp_path, {**CONFIG, "dynamic": rules})
    source = DummyWeights(0, torch.float32)

    def scheme(name: str) -> Any:
        return quantization.scheme(f"model.layers.{name}_proj", "any", source)

    assert scheme("0.self_attn.q") == DENSE
    assert (scheme("0.mlp.gate").bits, scheme("0.mlp.gate").group_size) == (4, 32)
    first, other = scheme("0.mlp.down"), scheme("3.mlp.down")
    assert (first.bits, first.group_size, first.symmetric) == (8, 64, True)
    assert (other.bits, other.group_size, other.symmetric) == (4, 32, False)
    assert scheme("1.mlp.up") == scheme("2.mlp.up")
    assert read(tmp_path, {**CONFIG, "dynamic": rules}) == quantization
    reordered = dict(reversed(rules.items()))
    assert read(tmp_path, {**CONFIG, "dynamic": reordered}) != quantization


def test_rules_match_the_names_of_a_checkpoint_without_a_head(tmp_path):
    short = NAME.removeprefix("model.")
    save(tmp_path, short, packed().tensors)
    source = HeadlessWeights(SafetensorsWeights(tmp_path))
    for text, bits in ((r"layers\.0\.", 8), (r"model\.layers\.0\.", 4)):
        quantization = read(tmp_path, {**CONFIG, "dynamic": {text: {"bits": 8}}})
        assert quantization.scheme(NAME, "gate_up_proj", source).bits == bits


def test_rules_that_take_too_long_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(expressions, "SECONDS", 0.3)
    save(tmp_path, "a" * 40, packed().tensors)
    own = Module(tmp_path, {**CONFIG, "dynamic": {"(a+)+$x": {}}}, "a" * 40, SIZE)
    with pytest.raises(ModelError, match=r"dynamic: its expressions take over"):
        own.scheme()


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({"dynamic": {"-:.*gate": {}}}, NAME, "is not quantised, but"),
        ({"modules_in_block_to_quantize": [["mlp.up_proj"]]}, NAME, "is not quantised, but"),
        ({}, "lm_head", "is not quantised, but"),
    ],
)
def test_a_rule_must_agree_with_the_tensors(tmp_path, fields, name, message):
    save(tmp_path, name, packed().tensors)
    role = name if name == "lm_head" else "gate_up_proj"
    own = Module(tmp_path, {**CONFIG, **fields}, name, SIZE, role)
    with pytest.raises(ModelError, match=rf"{name}: .*{message}.* tensor {name}\.qweight"):
        own.scheme()


def test_lists_of_modules_and_heads_are_read(tmp_path):
    listed = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.gate_proj"]]}
    made = packed()
    assert same(module(tmp_path, made.tensors, **listed).values(), made.weight)
    save(tmp_path, "lm_head", made.tensors)
    head = Module(tmp_path, {**CONFIG, "lm_head": True}, "lm_head", SIZE, "lm_head")
    assert same(head.values(), made.weight)
    save(tmp_path, NAME, {"weight": torch.ones(SIZE)})
    assert Module(tmp_path, CONFIG, NAME, SIZE).scheme() == DENSE
    with pytest.raises(ModelError, match=rf"is quantised, but .* {NAME}\.weight and no"):
        Module(tmp_path, {**CONFIG, **listed}, NAME, SIZE).scheme()


def test_a_bias_of_zeros_that_the_model_lacks_is_accepted_and_no_other(tmp_path):
    made = packed()
    own = module(tmp_path, {**made.tensors, "bias": torch.zeros(32).half()})
    assert same(own.values(), made.weight)
    own.source.finish()
    own = module(tmp_path, {**made.tensors, "bias": (torch.arange(32) == 31).half()})
    with pytest.raises(ModelError, match=rf"{NAME}\.bias is not of zeros"):
        own.read()
    part = Part(own.source, "l", NAME, all_of(32), all_of(64), torch.float32, CPU, bias=True)
    read = own.scheme().read(part).dequantized(slice(None), torch.float64)
    assert same(read[:, :64], made.weight)


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("qweight", lambda one: one[1:], r"is I32 \[7, 32\], config.json implies \[8, 32\]"),
        ("scales", lambda one: one[:1], r"is F16 \[1, 32\], config.json implies \[2, 32\]"),
        ("qzeros", lambda one: one.repeat(1, 2), r"is I32 \[2, 8\], config.json implies \[2, 4\]"),
        ("scales", lambda one: one * torch.inf, "has the scale inf"),
        ("qzeros", lambda one: one.float(), "is float32, but"),
    ],
)
def test_damaged_tensors_are_named(tmp_path, suffix, change, message):
    tensors = dict(packed().tensors)
    tensors[suffix] = change(tensors[suffix])
    with pytest.raises(ModelError, match=rf"tensor {NAME}\.{suffix} .*{message}"):
        module(tmp_path, tensors).read()


def test_sizes_that_words_cannot_hold_are_told_in_numbers(tmp_path):
    with pytest.raises(ModelError, match=r"qweight has 8 inputs in a word, but the layer 60"):
        module(tmp_path, packed().tensors, (32, 60)).read()
    tensors = packed().tensors | {"qweight": torch.ones(8, 30, dtype=torch.int32)}
    tensors |= {"scales": torch.ones(2, 30)}
    with pytest.raises(ModelError, match=r"qzeros has 8 outputs in a word, .* the 30 of it"):
        module(tmp_path, tensors, (30, 64)).read()
