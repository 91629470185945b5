"""ModelOpt: where its fields are, which modules it leaves out, and what is refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from packers.modelopt import EVERY
from safetensors.torch import save_file

from kiln.engine.errors import ModelError
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.fields import Fields
from kiln.engine.models.parameters import Parameters, Projection
from kiln.engine.models.quantization import read_quantization
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.scheme import DENSE
from kiln.engine.models.split import all_of

RANDOM = DummyWeights(0, torch.float32)
LAYER = "model.layers.1."
GATE, ROUTER, QUERY = LAYER + "mlp.gate_proj", LAYER + "mlp.gate", LAYER + "self_attn.q_proj"
ROLES = {GATE: "gate_up_proj", ROUTER: "router", QUERY: "qkv_proj", "lm_head": "lm_head"}
CONFIG = {"quant_method": "modelopt", "quant_algo": "FP8"}
TENSOR = {"dynamic": False, "num_bits": 8, "type": "float"}
GROUP = {"weights": TENSOR, "input_activations": TENSOR, "targets": ["Linear"]}


def quantization(folder, settings: dict[str, Any] | None, beside: Any = None) -> Any:
    """Read quantization_config, and hf_quant_config.json with what is beside it."""
    if beside is not None:
        content = {"producer": {"name": "modelopt", "version": "0.29"}, "quantization": beside}
        (folder / "hf_quant_config.json").write_text(json.dumps(content))
    values = {} if settings is None else {"quantization_config": settings}
    return read_quantization(Fields(values, folder / "config.json"), folder)


@pytest.mark.parametrize(
    ("entry", "left_out"),
    [
        ("lm_head", {"lm_head"}),
        ("lm_head*", {"lm_head"}),
        ("head", set()),
        ("mlp.gate", {ROUTER}),
        ("*.mlp.gate", {ROUTER}),
        ("*mlp.gate*", {ROUTER, GATE}),
        ("*.mlp.GATE", set()),
        ("mlp", {ROUTER, GATE}),
        ("model.layers.1", {ROUTER, GATE, QUERY}),
        ("model.layers.1*", {ROUTER, GATE, QUERY}),
        ("model.layers.[02]*", set()),
        ("model.layers.*.self_attn", {QUERY}),
        ("layers.1.self_attn", {QUERY}),
        ("yers.1.self_attn", set()),
        ("*.?_proj", {QUERY}),
        ("model.layers.11", set()),
    ],
)
def test_an_entry_is_a_name_a_part_of_one_or_a_wildcard(tmp_path, entry, left_out):
    for key in ("ignore", "exclude_modules"):
        read = quantization(tmp_path, {**CONFIG, key: [entry]})
        assert {n for n, role in ROLES.items() if read.scheme(n, role, RANDOM) == DENSE} == left_out
        assert read.scheme("model.embed_tokens", "embed_tokens", RANDOM) == DENSE


def test_both_files_are_read_and_must_agree(tmp_path):
    stored = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own = {**CONFIG, "quant_algo": "fp8", "ignore": ["lm_head"]}
    alone = quantization(tmp_path, own)
    assert quantization(tmp_path, None, stored) == alone
    assert quantization(tmp_path, own, {**stored, "kv_cache_quant_algo": None}) == alone
    assert (alone.method, alone.bits, alone.rounds_activations) == ("modelopt", 8.0, True)
    for other in ({"exclude_modules": []}, {"quant_algo": "FP8_PB_WO"}):
        with pytest.raises(ModelError, match=r"hf_quant_config\.json says something else"):
            quantization(tmp_path, own, {**stored, **other})


def test_groups_beside_the_algorithm_must_say_the_same(tmp_path):
    both = {**CONFIG, "config_groups": {"group_0": GROUP}, "producer": {"name": "modelopt"}}
    assert quantization(tmp_path, both) == quantization(tmp_path, CONFIG)
    with pytest.raises(ModelError, match=r"config_groups is .*, but quant_algo is 'FP8_PB_WO'"):
        quantization(tmp_path, {**both, "quant_algo": "FP8_PB_WO"})
    groups = {"group_0": {**GROUP, "targets": ["re:.*q_proj"]}}
    with pytest.raises(ModelError, match=r"config_groups is .*, want groups with the targets"):
        quantization(tmp_path, {**both, "config_groups": groups})


REFUSED = [
    *({"quant_algo": name} for name in ("NVFP4", "MXFP8", "MIXED_PRECISION", "W4A8_AWQ")),
    {"quant_algo": "w4a16_nvfp4"},
    {"quant_algo": None},
    {"kv_cache_quant_algo": "NVFP4"},
    {"group_size": 16},
    {"group_size": 64, "quant_algo": "FP8_PB_WO"},
    {"exclude_modules": "lm_head"},
    {"exclude_modules": ["a" * 5000 + "*"]},
    {"exclude_modules": [f"*{n}" for n in range(1001)]},
    {"quantized_layers": {"a": 1}},
    {"pre_quant_scale": True},
]


@pytest.mark.parametrize("wrong", REFUSED, ids=lambda wrong: str(wrong)[:40])
def test_what_is_not_supported_is_refused_by_name_in_either_file(tmp_path, wrong):
    name = next(iter(wrong))
    with pytest.raises(ModelError, match=rf"config\.json: quantization_config\.{name} is "):
        quantization(tmp_path, {**CONFIG, **wrong})
    with pytest.raises(ModelError, match=rf"hf_quant_config\.json: quantization\.{name} is "):
        quantization(tmp_path, None, {"quant_algo": "FP8", **wrong})


def test_scales_of_keys_and_values_are_checked(tmp_path):
    assert quantization(tmp_path, {**CONFIG, "kv_cache_scheme": TENSOR}).bits == 8.0
    with pytest.raises(ModelError, match=r"kv_cache_scheme\.num_bits is 4"):
        quantization(tmp_path, {**CONFIG, "kv_cache_scheme": {**TENSOR, "num_bits": 4}})


def test_wildcards_take_no_exponential_time(tmp_path):
    begun = time.process_time()
    read = quantization(tmp_path, {**CONFIG, "ignore": ["*a" * 300 + "!", "*.*" * 300 + "!"]})
    assert read.excluded.entry("model.layers.10." + "a" * 100) is None
    assert time.process_time() - begun < 30  # by backtracking it would take years


def write(folder, tensors: dict[str, torch.Tensor], module: str = "a") -> SafetensorsWeights:
    save_file({f"{module}.{name}": one for name, one in tensors.items()}, folder / "m.safetensors")
    (folder / "m.safetensors").rename(folder / "model.safetensors")
    return SafetensorsWeights(folder)


def packed(name: str) -> dict[str, torch.Tensor]:
    weight = torch.randn(64, 256, dtype=torch.float64)
    (packer,) = (one for one in EVERY if one.name == name)
    return dict(packer.pack(weight, torch.Generator()).tensors)


FP4 = {
    "weight": torch.zeros(64, 128, dtype=torch.uint8),
    "weight_scale": torch.ones(64, 16).to(torch.float8_e4m3fn),
    "weight_scale_2": torch.ones(()),
    "input_scale": torch.ones(()),
}


@pytest.mark.parametrize(
    ("more", "tensors", "message"),
    [
        ({}, {"weight": torch.zeros(64, 256)}, r"quant_algo FP8 quantises it, and .*float32"),
        ({}, FP4, r"quant_algo FP8 quantises it, .* tensor a\.weight_scale_2 is there"),
        ({}, {**FP4, "weight_scale_2": None}, r"a\.weight is uint8, but .*float8_e4m3fn"),
        ({"ignore": ["a"]}, packed("modelopt-fp8"), r"excluded by 'a', but tensor a\.weight is"),
        ({}, {**packed("modelopt-fp8"), "input_scale": None}, r"a\.input_scale is missing"),
        ({"quant_algo": "FP8_PB_WO"}, packed("modelopt-fp8"), r"a\.input_scale is there"),
        (
            {"quant_algo": "FP8_PB_WO"},
            {**packed("modelopt-blocks"), "weight_scale": torch.ones(1, 1, 3, 1)},
            r"a\.weight_scale is F32 \[1, 1, 3, 1\], config\.json implies \[1, 1, 2, 1\]",
        ),
        (
            {"quant_algo": "FP8_BLOCK_SCALES"},
            {**packed("modelopt-blocks"), "weight_scale": torch.ones(1, 3)},
            r"a\.weight_scale is F32 \[1, 3\], config\.json implies \[1, 2\]",
        ),
    ],
)
def test_tensors_of_another_format_are_named(tmp_path, more, tensors, message):
    source = write(tmp_path, {name: one for name, one in tensors.items() if one is not None})
    read = quantization(tmp_path, {**CONFIG, **more})
    parameters = Parameters(source, read, torch.float32, torch.device("cpu"))
    with pytest.raises(ModelError, match=message):
        parameters.linear(Projection("layers.0.o_proj", (("a", all_of(64)),), all_of(256)))
