"""compressed-tensors: which group a module belongs to, what is refused, and parts that differ."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from packers import modelopt
from packers.compressed_tensors import (
    EVERY,
    config,
    every_fp8_code,
    pack_8_bits,
    pack_ints,
    pack_words,
)
from safetensors.torch import save_file

from kiln.engine.errors import ModelError
from kiln.engine.layers.channel_weight import StaticWeight, TokenWeight
from kiln.engine.layers.group_weight import Group4Weight
from kiln.engine.layers.weight import DenseWeight
from kiln.engine.layers.weight_parts import MixedWeight
from kiln.engine.models import expressions
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.fields import Fields
from kiln.engine.models.parameters import Parameters, Projection
from kiln.engine.models.quantization import read_quantization
from kiln.engine.models.renamed_weights import HeadlessWeights
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.scheme import DENSE
from kiln.engine.models.split import Share, Split, all_of

CPU, FP8 = torch.device("cpu"), torch.float8_e4m3fn
CHANNEL = {"type": "float", "strategy": "channel"}
TOKEN = {"type": "float", "strategy": "token", "dynamic": True}
STATIC = {"type": "float", "strategy": "tensor"}
FLOAT = config("float-quantized", CHANNEL, None)
PACKED = config("pack-quantized", {"num_bits": 4, "group_size": 32}, None)
RANDOM = DummyWeights(0, torch.float32)


def quantization(folder, settings: dict[str, Any]) -> Any:
    fields = Fields({"quantization_config": settings}, folder / "config.json")
    return read_quantization(fields, folder)


def changed(settings: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return settings with another value at a path of keys."""
    settings = copy.deepcopy(settings)
    *keys, last = path.split("/")
    place = settings
    for key in keys:
        place = place[key]
    place[last] = value
    return settings


LAYER = "model.layers.0."
GATE, ROUTER = LAYER + "mlp.gate_proj", LAYER + "mlp.gate"
DOWN = LAYER + "mlp.down_proj"


@pytest.mark.parametrize(
    ("entry", "left_out"),
    [
        ("mlp.gate", set()),
        (ROUTER, {ROUTER}),
        ("re:.*mlp.gate", {ROUTER, GATE}),
        ("re:.*mlp.gate$", {ROUTER}),
        ("re:.*mlp\\.(gate|up)$", {ROUTER}),
        ("re:mlp.gate", set()),
        ("re:model.*(?<!down)_proj", {GATE}),
        ("re:lm_head", {"lm_head"}),
        ("re:head", set()),
        ("Linear", {GATE, ROUTER, DOWN, "lm_head"}),
        ("LlamaMLP", set()),
    ],
)
def test_an_entry_of_ignore_means_what_the_library_reads(tmp_path, entry, left_out):
    roles = {GATE: "gate_up_proj", ROUTER: "router", DOWN: "down_proj", "lm_head": "lm_head"}
    read = quantization(tmp_path, {**FLOAT, "ignore": [entry]})
    assert {n for n, role in roles.items() if read.scheme(n, role, RANDOM) == DENSE} == left_out
    assert read.scheme("model.embed_tokens", "embed_tokens", RANDOM) == DENSE


def test_an_embedding_is_a_target_by_its_name_or_class(tmp_path):
    for target in ("Embedding", "model.embed_tokens", "re:.*embed"):
        settings = changed(PACKED, "config_groups/group_0/targets", [target])
        read = quantization(tmp_path, settings)
        assert read.scheme("model.embed_tokens", "embed_tokens", RANDOM) != DENSE
        assert read.scheme("lm_head", "lm_head", RANDOM) == DENSE


def two_groups(first: list[str], second: list[str]) -> dict[str, Any]:
    """fp8 weights for the first targets, int4 for the second."""
    fp8, int4 = (one["config_groups"]["group_0"] for one in (FLOAT, PACKED))
    groups = {
        "first": {**fp8, "targets": first, "format": "float-quantized"},
        "second": {**int4, "targets": second, "format": "pack-quantized"},
    }
    return {**FLOAT, "format": "mixed-precision", "config_groups": groups}


def test_a_name_comes_before_a_class_and_ignore_before_both(tmp_path):
    for groups in (two_groups(["Linear"], ["re:.*down_proj"]), two_groups([DOWN], ["Linear"])):
        fp8, int4 = (one.scheme for one in quantization(tmp_path, groups).groups)
        read = quantization(tmp_path, groups)
        first = groups["config_groups"]["first"]["targets"] == ["Linear"]
        assert read.scheme(DOWN, "down_proj", RANDOM) == (int4 if first else fp8)
        assert read.scheme(GATE, "gate_up_proj", RANDOM) == (fp8 if first else int4)
        read = quantization(tmp_path, {**groups, "ignore": ["re:.*down"]})
        assert read.scheme(DOWN, "down_proj", RANDOM) == DENSE


@pytest.mark.parametrize("targets", [(["Linear"], ["Linear"]), ([DOWN], ["re:.*down_proj"])])
def test_a_module_of_two_groups_is_refused(tmp_path, targets):
    read = quantization(tmp_path, two_groups(*targets))
    wanted = rf"the groups first .* and second .* target {DOWN}, and libraries differ"
    with pytest.raises(ModelError, match=wanted):
        read.scheme(DOWN, "down_proj", RANDOM)


GROUP_128 = {"num_bits": 4, "strategy": "group", "group_size": 128}
INT8, INT8_TOKEN = {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
ROUNDED = {"type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
BLOCKS = {"type": "float", "strategy": "block", "block_structure": [128, 128]}


@pytest.mark.parametrize(
    ("preset", "format_", "weights", "inputs"),
    [
        ("FP8", "float-quantized", {"type": "float", "strategy": "tensor"}, STATIC),
        ("fp8_dynamic", "float-quantized", CHANNEL, TOKEN),
        ("FP8_BLOCK", "float-quantized", BLOCKS, ROUNDED),
        ("W8A8", "int-quantized", INT8, INT8_TOKEN),
        ("INT8", "int-quantized", INT8, INT8_TOKEN),
        ("W8A16", "pack-quantized", INT8, None),
        ("W4A16", "pack-quantized", GROUP_128, None),
        ("W4A16_ASYM", "pack-quantized", {**GROUP_128, "symmetric": False}, None),
    ],
)
def test_a_preset_is_the_group_that_it_stands_for(tmp_path, preset, format_, weights, inputs):
    written = config(format_, weights, inputs)
    short = {**written, "config_groups": {preset: ["Linear"]}}
    assert quantization(tmp_path, short) == quantization(tmp_path, written)
    assert quantization(tmp_path, short) != quantization(tmp_path, {**short, "ignore": []})


@pytest.mark.parametrize(
    ("settings", "rounds", "bits"),
    [
        (FLOAT, False, 8.0),
        (config("float-quantized", CHANNEL, TOKEN), True, 8.0),
        (config("float-quantized", BLOCKS, ROUNDED), True, 8.0),
        (PACKED, False, 5.0),
        (config("pack-quantized", {**GROUP_128, "symmetric": False}, None), False, 4.375),
        (two_groups([DOWN], ["Linear"]), False, 8.0),
        ({**FLOAT, "config_groups": {}}, False, 0.0),
    ],
)
def test_what_estimates_and_kernels_are_told_is_true(tmp_path, settings, rounds, bits):
    read = quantization(tmp_path, settings)
    assert (read.method, read.rounds_activations, read.bits) == ("compressed-tensors", rounds, bits)


WEIGHTS, INPUTS = "config_groups/group_0/weights", "config_groups/group_0/input_activations"
ROUNDING = config("float-quantized", CHANNEL, TOKEN)
IN_BLOCKS = config("float-quantized", BLOCKS, ROUNDED)
REFUSED = [
    (FLOAT, "format", "nvfp4-pack-quantized", r"format is 'nvfp4-pack-quantized', Kiln supports"),
    (FLOAT, "format", None, r"quantization_config\.format is None"),
    (FLOAT, "format", "mixed-precision", r"group_0\.format is None, Kiln supports"),
    (FLOAT, "config_groups/group_0/format", "int-quantized", r"but that of all groups is 'float-q"),
    (FLOAT, "quantization_status", "thawed", r"quantization_status is 'thawed'"),
    (FLOAT, "transform_config", {"R1": 1}, r"transform_config is .*does not know"),
    (FLOAT, "sparsity_config", {"format": "sparse-24"}, r"sparsity_config is "),
    (FLOAT, "wheels", 4, r"quantization_config\.wheels is 4, Kiln does not know"),
    (FLOAT, "config_groups/group_0/wheels", 4, r"config_groups\.group_0\.wheels is 4"),
    (FLOAT, f"{WEIGHTS}/wheels", 4, r"group_0\.weights\.wheels is 4"),
    (FLOAT, "config_groups/NVFP4", ["Linear"], r"config_groups\.NVFP4 is .*by name: FP8,"),
    (FLOAT, "config_groups/group_1", {}, r"config_groups\.group_1 is \{\}, want an object"),
    (FLOAT, "config_groups/group_0/targets", [], r"group_0\.targets is \[\], want a list of mod"),
    (
        FLOAT,
        "config_groups/group_0/targets",
        ["re:("],
        r"targets is .*'re:\(' is not an expression",
    ),
    (FLOAT, "ignore", ["re:a{2,1}"], r"ignore is .* is not an expression"),
    (FLOAT, "ignore", [f"re:{n}" for n in range(1001)], r"at most 1000 are read"),
    (FLOAT, "ignore", "lm_head", r"ignore is 'lm_head', want a list of strings"),
    (FLOAT, "config_groups/group_0/weights", None, r"weights is None, Kiln supports only groups"),
    (FLOAT, "config_groups/group_0/output_activations", STATIC, r"output_activations is "),
    (FLOAT, f"{WEIGHTS}/num_bits", 4, r"weights\.num_bits is 4, .*'float-quantized'"),
    (FLOAT, f"{WEIGHTS}/type", "int", r"weights\.type is 'int', but its format is 'float"),
    (FLOAT, f"{WEIGHTS}/type", "bool", r"weights\.type is 'bool', want 'int' or 'float'"),
    (FLOAT, f"{WEIGHTS}/symmetric", False, r"weights\.symmetric is False"),
    (FLOAT, f"{WEIGHTS}/dynamic", True, r"weights\.dynamic is True"),
    (FLOAT, f"{WEIGHTS}/dynamic", "local", r"weights\.dynamic is 'local', want true or false"),
    (FLOAT, f"{WEIGHTS}/strategy", "token", r"weights\.strategy is 'token'"),
    (FLOAT, f"{WEIGHTS}/strategy", "tensor_group", r"strategy is 'tensor_group', Kiln supports"),
    (FLOAT, f"{WEIGHTS}/group_size", 32, r"group_size is 32, .* the strategy 'channel'"),
    (FLOAT, f"{WEIGHTS}/group_size", -2, r"group_size is -2, want an integer"),
    (FLOAT, f"{WEIGHTS}/block_structure", [128, 128], r"block_structure is \[128, 128\]"),
    (FLOAT, f"{WEIGHTS}/actorder", "group", r"actorder is 'group', .* 'channel'"),
    (IN_BLOCKS, f"{WEIGHTS}/block_structure", "64x128", r"block_structure is '64x128'"),
    (IN_BLOCKS, f"{WEIGHTS}/block_structure", None, r"block_structure is None"),
    (IN_BLOCKS, f"{INPUTS}/group_size", 64, r"input_activations\.group_size is 64"),
    (IN_BLOCKS, INPUTS, TOKEN, r"means 'token' with dynamic true: beside weights of 'block'"),
    (ROUNDING, INPUTS, ROUNDED, r"means 'group' with dynamic true: beside weights of 'channel'"),
    (ROUNDING, f"{INPUTS}/dynamic", False, r"'token' with dynamic false"),
    (
        ROUNDING,
        f"{INPUTS}/strategy",
        None,
        r"strategy is None, which means 'tensor' with dynamic t",
    ),
    (ROUNDING, f"{INPUTS}/type", "int", r"input_activations\.type is 'int', but weights are 'flo"),
    (ROUNDING, f"{INPUTS}/num_bits", 4, r"input_activations\.num_bits is 4"),
    (ROUNDING, f"{INPUTS}/symmetric", False, r"input_activations\.symmetric is False"),
    (PACKED, f"{WEIGHTS}/num_bits", 3, r"num_bits is 3, with 'pack-quantized' Kiln supports 4 an"),
    (PACKED, f"{WEIGHTS}/type", "float", r"weights\.type is 'float'"),
    (PACKED, f"{WEIGHTS}/group_size", None, r"strategy is None, with 'pack-quantized' Kiln sup"),
    (PACKED, f"{WEIGHTS}/actorder", "random", r"actorder is 'random'"),
    (PACKED, INPUTS, INT8_TOKEN, r"input_activations is .*, with 'pack-quantized'"),
    (FLOAT, "kv_cache_scheme", {"strategy": "attn_head"}, r"strategy is 'attn_head'"),
    (FLOAT, "kv_cache_scheme", {"type": "int"}, r"kv_cache_scheme\.type is 'int', .* 'float'"),
    (FLOAT, "kv_cache_scheme", {"type": "float", "num_bits": 4}, r"num_bits is 4, .* only 8"),
    (FLOAT, "kv_cache_scheme", {"type": "float", "dynamic": True}, r"dynamic is True"),
    (FLOAT, "kv_cache_scheme", {"type": "float", "strategy": "channel"}, r"strategy is 'channel'"),
]


@pytest.mark.parametrize(("settings", "path", "value", "message"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(tmp_path, settings, path, value, message):
    with pytest.raises(ModelError, match=message):
        quantization(tmp_path, changed(settings, path, value))


def test_what_has_no_effect_is_accepted(tmp_path):
    same = {
        **FLOAT,
        **{"version": "0.20", "global_compression_ratio": 1.5, "quantization_status": "frozen"},
        **{"transform_config": {}, "sparsity_config": {}, "moe_sparsity_config": None},
        "kv_cache_scheme": {"type": "float", "strategy": "tensor", "observer": "minmax"},
    }
    for name, value in (("observer", "mse"), ("observer_kwargs", {"a": 1}), ("scale_dtype", "x")):
        same = changed(same, f"{WEIGHTS}/{name}", value)
    assert quantization(tmp_path, same) == quantization(tmp_path, FLOAT)


BAD = r"re:(\w*\.?)*!"


@pytest.mark.parametrize("path", ["ignore", "config_groups/group_0/targets"])
def test_no_expression_takes_longer_than_the_limit(tmp_path, monkeypatch, path):
    monkeypatch.setattr(expressions, "SECONDS", 0.5)
    read = quantization(tmp_path, changed(FLOAT, path, [BAD]))
    begun = time.monotonic()
    with pytest.raises(ModelError, match=r"json: quantization_config: its expressions take over"):
        read.scheme(DOWN, "down_proj", RANDOM)
    assert time.monotonic() - begun < 60  # without the limit it would take years


def write(folder, tensors: dict[str, torch.Tensor]) -> SafetensorsWeights:
    made = {name: one.contiguous().clone() for name, one in tensors.items()}
    save_file(made, folder / "model.safetensors")
    return SafetensorsWeights(folder)


def under(module: str, tensors: Any) -> dict[str, torch.Tensor]:
    return {f"{module}.{suffix}": one for suffix, one in tensors.items()}


def test_all_modules_of_a_checkpoint_are_matched_at_once(tmp_path, monkeypatch):
    names = [f"model.layers.{layer}.mlp.down_proj" for layer in range(9)]
    source = write(tmp_path, {f"{name}.weight": torch.zeros(2, 2) for name in names})
    calls, real = [], expressions.subprocess.run

    def run(*args, **more):
        calls.append(args)
        return real(*args, **more)

    monkeypatch.setattr(expressions.subprocess, "run", run)
    read = quantization(tmp_path, {**FLOAT, "ignore": ["re:(model|other).*down", "re:(a|b)"]})
    assert all(read.scheme(name, "down_proj", source) == DENSE for name in names)
    assert len(calls) == 1


def test_lists_have_the_names_of_the_checkpoint(tmp_path):
    """A model that ends at the hidden states has tensors without the prefix "model."."""
    packed = pack_8_bits(torch.randn(8, 16).double(), torch.Generator(), "float", "channel", FP8)
    packed = under("layers.0.mlp.up_proj", {**packed.tensors, "weight_scale": torch.ones(8, 1)})
    source = write(tmp_path, {"layers.0.mlp.down_proj.weight": torch.zeros(2, 2), **packed})
    headless = HeadlessWeights(source)
    for entry in ("layers.0.mlp.down_proj", r"re:layers\.0.*down"):
        read = quantization(tmp_path, {**FLOAT, "ignore": [entry]})
        assert read.scheme(DOWN, "down_proj", headless) == DENSE
        assert read.scheme(LAYER + "mlp.up_proj", "gate_up_proj", headless) != DENSE
    with pytest.raises(ModelError, match="quantises it by its target 'Linear', but tensor"):
        quantization(tmp_path, FLOAT).scheme(DOWN, "down_proj", headless)


# What the config says against what the tensors are.

EIGHT = {"weight": torch.zeros(8, 16).to(FP8), "weight_scale": torch.ones(8, 1)}
FLOATS = {"weight": torch.zeros(8, 16, dtype=torch.bfloat16)}


@pytest.mark.parametrize(
    ("ignore", "tensors", "message"),
    [
        ([], FLOATS, r"group_0 quantises it by its target 'Linear', but .*gate\.weight .*bfloat16"),
        ([], {**EIGHT, "weight_zero_point": torch.zeros(8, 1)}, r"gate\.weight_zero_point is ther"),
        ([], {**EIGHT, "input_scale": torch.ones(1)}, r"tensor model\S+gate\.input_scale is there"),
        ([], {**EIGHT, "weight_scale_2": torch.ones(1)}, r"gate\.weight_scale_2 is there"),
        (["re:.*gate"], EIGHT, r"leaves it out by its entry 're:\.\*gate', but .*float8_e4m3fn"),
        (
            ["Linear"],
            {"weight_packed": torch.zeros(1)},
            r"entry 'Linear', but .*gate\.weight_packed",
        ),
        (["Linear"], {**FLOATS, "weight_scale": torch.ones(1)}, r"gate\.weight_scale is there"),
    ],
)
def test_a_config_and_tensors_that_disagree_are_both_named(tmp_path, ignore, tensors, message):
    source = write(tmp_path, under(ROUTER, tensors))
    read = quantization(tmp_path, {**FLOAT, "ignore": ignore})
    with pytest.raises(ModelError, match=message):
        read.scheme(ROUTER, "router", source)
    settings = changed(FLOAT, "config_groups/group_0/targets", ["re:.*down"])
    if "weight_scale" in tensors:
        with pytest.raises(ModelError, match="no group of config_groups targets it, but tensor"):
            quantization(tmp_path, {**settings, "ignore": []}).scheme(ROUTER, "router", source)


def made(folder, settings, tensors, projection, dtype=torch.float32) -> Any:
    """Return a layer as Parameters makes it, with no tensor left over."""
    source = write(folder, tensors)
    layer = Parameters(source, quantization(folder, settings), dtype, CPU).linear(projection)
    source.finish()
    return layer


ASYMMETRIC = config("pack-quantized", {**GROUP_128, "group_size": 32, "symmetric": False}, None)
ORDERED = config("pack-quantized", {**GROUP_128, "group_size": 32, "actorder": "group"}, None)


def packed_ints(**more: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(8, 64, generator=generator, dtype=torch.float64)
    return dict(pack_ints(weight, generator, 4, 32, torch.float32, **more).tensors)


def packed_floats(**more: Any) -> dict[str, torch.Tensor]:
    weight = torch.randn(8, 64, dtype=torch.float64)
    return dict(
        pack_8_bits(weight, torch.Generator(), "float", "channel", torch.float32, **more).tensors
    )


def with_value(tensor: torch.Tensor, value: float) -> torch.Tensor:
    out = tensor.clone()
    if out.dtype == FP8:
        out.view(torch.uint8)[3, 0] = int(value)
    else:
        out.view(-1)[3] = value
    return out


NAN, OLD = float("nan"), {"symmetric": False, "unpacked_zeros": True}
STATIC_CONFIG = config("float-quantized", CHANNEL, STATIC)
DAMAGED = [
    (FLOAT, packed_floats(), "weight", 0x7F, r"a\.weight has codes that are no numbers"),
    (FLOAT, packed_floats(), "weight", 0xFF, r"a\.weight has codes that are no numbers"),
    (FLOAT, packed_floats(), "weight_scale", NAN, r"a\.weight_scale has the scale nan"),
    (FLOAT, packed_floats(), "weight_scale", -1.0, r"a\.weight_scale has the scale -1"),
    (FLOAT, packed_floats(), "weight_scale", None, r"a\.weight_scale is missing"),
    (FLOAT, packed_floats(), "weight_scale", torch.ones(8, 1).int(), r"weight_scale is int32, but"),
    (FLOAT, packed_floats(), "weight_scale", torch.ones(7, 1), r"weight_scale is F32 \[7, 1\], c"),
    (
        FLOAT,
        packed_floats(),
        "weight",
        torch.zeros(8, 64).char(),
        r"a\.weight is int8, but .*float8",
    ),
    (
        FLOAT,
        packed_floats(),
        "weight",
        torch.zeros(8, 63).to(FP8),
        r"a\.weight is F8_E4M3 \[8, 63\]",
    ),
    (STATIC_CONFIG, packed_floats(), "input_scale", None, r"a\.input_scale is missing"),
    (STATIC_CONFIG, packed_floats(), "input_scale", torch.zeros(1), r"a\.input_scale is 0"),
    (STATIC_CONFIG, packed_floats(), "input_scale", torch.ones(2), r"a\.input_scale is F32 \[2\]"),
    (
        PACKED,
        packed_ints(),
        "weight_shape",
        torch.tensor([8, 60]),
        r"shape holds \[8, 60\], .*64\]",
    ),
    (PACKED, packed_ints(), "weight_shape", None, r"a\.weight_shape is missing"),
    (PACKED, packed_ints(), "weight_scale", torch.ones(8, 4), r"weight_scale is F32 \[8, 4\]"),
    (PACKED, packed_ints(), "weight_packed", None, r"a\.weight_packed is missing"),
    (PACKED, packed_ints(), "weight_packed", torch.zeros(8, 8), r"weight_packed is float32, but"),
    (PACKED, packed_ints(symmetric=False), "", None, r"target 'Linear', but .*zero_point is there"),
    (PACKED, packed_ints(any_order=True), "", None, r"target 'Linear', but .*g_idx is there"),
    (ASYMMETRIC, packed_ints(), "", None, r"a\.weight_zero_point is missing"),
    (
        ASYMMETRIC,
        packed_ints(**OLD),
        "weight_zero_point",
        8,
        r"weight_zero_point holds 8: want -8 t",
    ),
    (ASYMMETRIC, packed_ints(**OLD), "weight_zero_point", -9, r"weight_zero_point holds -9"),
    (ORDERED, packed_ints(), "", None, r"a\.weight_g_idx is missing"),
    (
        ORDERED,
        packed_ints(any_order=True),
        "weight_g_idx",
        2,
        r"weight_g_idx has group 2: want",
    ),
    (ORDERED, packed_ints(any_order=True), "weight_g_idx", -1, r"weight_g_idx has group -1"),
    (
        *(ORDERED, packed_ints(any_order=True), "weight_g_idx", torch.arange(64).int() // 40),
        r"weight_g_idx has 40 inputs of group 0: want 32",
    ),
    (
        changed(PACKED, f"{WEIGHTS}/group_size", 48),
        *(packed_ints(), "", None, r"weight_packed has 64 inputs, not a multiple of group_size 48"),
    ),
]


@pytest.mark.parametrize(("settings", "tensors", "suffix", "value", "message"), DAMAGED)
def test_damaged_tensors_are_named(tmp_path, settings, tensors, suffix, value, message):
    if isinstance(value, torch.Tensor):
        tensors = {**tensors, suffix: value}
    elif value is not None:
        tensors = {**tensors, suffix: with_value(tensors[suffix], value)}
    else:
        tensors = {name: one for name, one in tensors.items() if name != suffix}
    projection = Projection("layers.0.o_proj", (("a", all_of(8)),), all_of(64))
    with pytest.raises(ModelError, match=message):
        made(tmp_path, settings, under("a", tensors), projection)


# Parts of one projection that differ.

PARTS = {"q": 96, "k": 32, "v": 32}
QKV = Projection(
    "layers.0.qkv_proj", tuple((name, all_of(size)) for name, size in PARTS.items()), all_of(64)
)


def qkv(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = {"generator": generator, "dtype": torch.float64}
    return {name: torch.randn(size, 64, **draw) for name, size in PARTS.items()}


@pytest.mark.parametrize("ignored", [["q"], ["k"], ["v"], ["q", "k", "v"], ["re:[qv]"]])
def test_an_ignored_part_of_a_fused_projection_is_kept_as_floats(tmp_path, ignored):
    left_out = [
        name for name in PARTS if name in ignored or (ignored == ["re:[qv]"] and name != "k")
    ]
    tensors, wanted = {}, []
    for name, weight in qkv().items():
        if name in left_out:
            tensors[f"{name}.weight"] = weight.float()
            wanted.append(weight.float())
        else:
            packed = pack_ints(weight, torch.Generator(), 4, 32, torch.bfloat16)
            tensors |= under(name, packed.tensors)
            wanted.append(packed.weight.float())
    layer = made(tmp_path, {**PACKED, "ignore": ignored}, tensors, QKV)
    kinds = DenseWeight if len(left_out) == 3 else MixedWeight
    assert isinstance(layer.weight, kinds)
    x, weight = torch.randn(5, 64), torch.cat(wanted)
    assert torch.equal(layer.weight.dequantized(slice(None), torch.float32)[:, :64], weight)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=1e-5, atol=1e-5)


def test_parts_keep_their_own_scales_of_weights_and_inputs(tmp_path):
    settings = config("float-quantized", {"type": "float"}, STATIC)
    tensors, wanted, x = {}, [], torch.randn(5, 64)
    for index, (name, weight) in enumerate(qkv().items()):
        packed = pack_8_bits(
            weight * 10**index, torch.Generator(), "float", "tensor", torch.float32, static=True
        )
        scale = torch.tensor([0.01 if name == "q" else 0.03])
        tensors |= under(name, {**packed.tensors, "input_scale": scale})
        rounded = (x / scale).to(FP8).double() * scale.double()
        wanted.append(rounded @ packed.weight.T)
    layer = made(tmp_path, settings, tensors, QKV)
    assert [type(part) for part in layer.weight.parts] == [StaticWeight, StaticWeight]
    assert [part.out_features for part in layer.weight.parts] == [96, 64]
    error = (layer(x).double() - torch.cat(wanted, 1)).abs() / torch.cat(wanted, 1).abs().amax(0)
    assert float(error.max()) < 1e-2  # a code may be the neighbour, see test_formats
    assert float(error.median()) < 1e-6


def test_parts_of_different_groups_keep_their_own_schemes(tmp_path):
    groups = two_groups(["q"], ["re:(k|v)$"])
    groups["config_groups"]["first"]["input_activations"] = TOKEN
    tensors, wanted = {}, []
    for name, weight in qkv().items():
        if name == "q":
            packed = pack_8_bits(weight, torch.Generator(), "float", "channel", torch.float16)
        else:
            packed = pack_ints(weight, torch.Generator(), 4, 32, torch.float16)
        tensors |= under(name, packed.tensors)
        wanted.append(packed.weight.float())
    layer = made(tmp_path, groups, tensors, QKV)
    assert [type(part) for part in layer.weight.parts] == [TokenWeight, Group4Weight]
    got = layer.weight.dequantized(slice(None), torch.float32)[:, :64]
    assert torch.equal(got, torch.cat(wanted))


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("ordered", [None, 1])
def test_experts_keep_the_order_of_inputs_of_each_part(tmp_path, same, ordered):
    """gate and up may have their groups in different orders, an expert in the usual one."""
    tensors, wanted, parts = {}, [], []
    for expert in range(3):
        for number, name in enumerate(("gate_proj", "up_proj")):
            generator = torch.Generator().manual_seed(expert if same else 2 * expert + number)
            weight = torch.randn(16, 64, generator=generator, dtype=torch.float64)
            packed = pack_ints(weight, generator, 4, 32, torch.float32, any_order=True)
            if expert == ordered:
                usual = pack_ints(weight, generator, 4, 32, torch.float32)
                order = {"weight_g_idx": torch.arange(64).int() // 32}
                packed = replace(usual, tensors={**usual.tensors, **order})
            module = f"experts.{expert}.{name}"
            tensors |= under(module, packed.tensors)
            wanted.append(packed.weight.float())
            parts.append((module, all_of(16)))
    source = write(tmp_path, tensors)
    projection = Projection("layers.0.experts.gate_up_proj", tuple(parts), all_of(64))
    parameters = Parameters(source, quantization(tmp_path, ORDERED), torch.float32, CPU)
    weight = parameters.experts(projection, 3)
    source.finish()
    got = weight.dequantized(slice(None), torch.float32)[..., :64]
    assert torch.equal(got, torch.stack(wanted).view(3, 32, 64))


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_ranks_have_their_tokens_of_a_quantised_head_and_embedding(tmp_path, world):
    """Some have none: 7 ranks have 2 of 8 tokens each, the last three nothing."""
    packed = pack_ints(
        torch.randn(8, 64, dtype=torch.float64), torch.Generator(), 4, 32, torch.float32, False
    )
    settings = {**ASYMMETRIC, "ignore": []}
    settings = changed(settings, "config_groups/group_0/targets", ["Linear", "Embedding"])
    names = ("lm_head", "model.embed_tokens")
    tensors = {key: one for name in names for key, one in under(name, packed.tensors).items()}
    heads, tables = [], []
    for rank in range(world):
        share = Split(rank, world, "tp").vocabulary(8)
        source = write(tmp_path, tensors)
        parameters = Parameters(source, quantization(tmp_path, settings), torch.float32, CPU)
        head = parameters.linear(Projection("lm_head", (("lm_head", share),), all_of(64)))
        table = parameters.embedding("model.embed_tokens", share, 64).weight
        source.finish()
        heads.append(head.weight.dequantized(slice(None), torch.float32)[: share.size, :64])
        tables.append(table[: share.size])
        assert not table[share.size :].any()
    assert torch.equal(torch.cat(heads), packed.weight.float())
    assert torch.equal(torch.cat(tables), packed.weight.float())


def test_random_weights_need_no_checkpoint(tmp_path):
    for packer in EVERY:
        read = quantization(tmp_path, dict(packer.config))
        layer = Parameters(RANDOM, read, torch.float32, CPU).linear(QKV)
        assert layer.weight.out_features == 160
        assert layer(torch.randn(3, 64)).std() > 0


@pytest.mark.parametrize("packer", [*EVERY, *modelopt.EVERY], ids=lambda packer: packer.name)
def test_every_kind_of_checkpoint_is_the_formula(tmp_path, packer):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).double()
    packed = packer.pack(weight, torch.Generator().manual_seed(1))
    projection = Projection("layers.0.o_proj", (("a", all_of(96)),), all_of(256))
    layer = made(tmp_path, dict(packer.config), under("a", packed.tensors), projection)
    got = layer.weight.dequantized(slice(None), torch.float32)
    torch.testing.assert_close(got, packed.weight.float(), rtol=2**-23, atol=0)


def test_packers_write_every_code_and_every_zero_point():
    for packer in EVERY:
        name = packer.name
        generator = torch.Generator().manual_seed(0)
        packed = packer.pack(torch.randn(256, 256, dtype=torch.float64), generator).tensors
        if "weight" in packed:
            codes = packed["weight"].view(torch.uint8).unique().tolist()
            wanted = every_fp8_code().view(torch.uint8).tolist()
            assert codes == (wanted if packed["weight"].dtype == FP8 else list(range(256))), name
            continue
        bits = packer.config["config_groups"]["group_0"]["weights"]["num_bits"]
        for suffix in ("weight_packed", "weight_zero_point"):
            words = packed.get(suffix)
            if words is None:
                continue
            if words.dtype == torch.int8:
                words = pack_words((words.long() + 2 ** (bits - 1)).T, bits)
            shifts = torch.arange(0, 32, bits)
            found = (words.long().unsqueeze(-1) >> shifts & 2**bits - 1).unique()
            assert found.tolist() == list(range(2**bits)), (name, suffix)


def test_a_share_of_outputs_may_start_inside_a_word_of_zero_points(tmp_path):
    weight = torch.randn(24, 64, dtype=torch.float64)
    packed = pack_ints(weight, torch.Generator(), 4, 32, torch.float32, symmetric=False)
    source = write(tmp_path, under("a", packed.tensors))
    read = quantization(tmp_path, ASYMMETRIC)
    for inputs in (all_of(64), Share(16, 16, 64, 16), Share(48, 16, 64, 24)):
        parts = (("a", Share(5, 9, 24, 12)),)
        projection = Projection("layers.0.o_proj", parts, inputs)
        layer = Parameters(source, read, torch.float32, CPU).linear(projection)
        got = layer.weight.dequantized(slice(None), torch.float32)
        assert torch.equal(got[:9, : inputs.size], packed.weight[5:14, inputs.place].float())
        assert not got[9:].any()
        assert not got[:, inputs.size :].any()
