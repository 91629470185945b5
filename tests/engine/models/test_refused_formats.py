"""Formats that Kiln knows but does not read are refused by name, with what to do instead."""

from __future__ import annotations

import json
from typing import Any

import pytest
from quantised_modules import config as read

from kiln.engine.errors import ModelError
from kiln.engine.models.quantization import known_formats
from kiln.engine.models.refused_formats import REASONS
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights

METHODS = (
    *("bitsandbytes", "nvfp4", "gguf", "aqlm", "hqq", "quanto", "torchao", "eetq", "higgs", "vptq"),
    *(
        "spqr",
        "fp_quant",
        "bitnet",
        "quark",
        "fbgemm_fp8",
        "NVFP4",
        "intel/auto-round",
        "modelopt_fp4",
    ),
)
ROUND = {
    "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
    "packing_format": "auto_round:auto_gptq", "iters": 200, "autoround_version": "0.5.1",
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_format_is_refused_by_its_name_with_advice(tmp_path, method):
    with pytest.raises(ModelError) as caught:
        read(tmp_path, {"quant_method": method, "bits": 4, "anything": 1})
    message = str(caught.value)
    assert f"quant_method is {method!r}, which Kiln does not read: " in message
    assert "load the unquantised base model instead" in message
    assert message.startswith(f"{tmp_path / 'config.json'}: quantization_config.")


def test_no_format_is_both_read_and_refused():
    assert not set(REASONS) & {name.lower().replace("_", "-") for name in known_formats()}


@pytest.mark.parametrize("algorithm", ["NVFP4", "nvfp4", "W4A16_NVFP4"])
def test_an_algorithm_is_refused_by_its_name(tmp_path, algorithm):
    with pytest.raises(ModelError, match=rf"quant_algo is '{algorithm}', which Kiln does not read"):
        read(tmp_path, {"quant_method": "modelopt", "quant_algo": algorithm})


def test_old_bitsandbytes_is_known_by_its_flags(tmp_path):
    for name in ("load_in_4bit", "load_in_8bit"):
        with pytest.raises(ModelError, match=rf"{name} is True, which is bitsandbytes: .* base"):
            read(tmp_path, {name: True, "bnb_4bit_quant_type": "nf4"})
    with pytest.raises(ModelError, match="quant_method is missing"):
        read(tmp_path, {"load_in_4bit": False, "bits": 4})


def test_a_method_or_a_form_of_fp8_that_kiln_does_not_read_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"quant_method is 'squeeze', Kiln supports .*awq.*gptq"):
        read(tmp_path, {"quant_method": "squeeze"})
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert read(tmp_path, {**fp8, "dequantize": False}) == read(tmp_path, fp8)
    for name, value, message in [
        ("fmt", "e5m2", "Kiln supports only 'e4m3'"),
        ("scale_fmt", "ue8m0", "Kiln supports only 'float'"),
        ("expert_dtype", "fp4", "Kiln supports only 'fp8'"),
        ("weight_block_size", [64, 64], r"Kiln supports only \[128, 128\]"),
        ("activation_scheme", "static", "with blocks Kiln supports only 'dynamic'"),
        ("activation_scheme", "none", "want 'dynamic' or 'static'"),
        ("dequantize", True, "Kiln does not know this field"),  # then activations stay floats
    ]:
        with pytest.raises(ModelError, match=rf"{name} is .*, {message}"):
            read(tmp_path, {**fp8, name: value})


def test_a_folder_of_gguf_files_is_told_so(tmp_path, small_config):
    for name in ("model-Q8.gguf", "model-Q4.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"config.json is missing: model-Q4.gguf is of GGUF, but"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small_config("LlamaForCausalLM")))
    with pytest.raises(ModelError, match=r"no weights found, model-Q4.gguf is of GGUF, but .*base"):
        SafetensorsWeights(tmp_path)


def test_autoround_is_read_where_it_packs_as_others_do(tmp_path):
    gptq = read(tmp_path, ROUND)
    assert (gptq.method, gptq.stored.bits, gptq.stored.signed) == ("gptq", 4, True)
    awq = read(tmp_path, {**ROUND, "packing_format": "auto_round:auto_awq"})
    assert (awq.method, awq.stored.group_size, awq.stored.signed) == ("awq", 128, True)
    older = {name: one for name, one in ROUND.items() if name != "packing_format"}
    assert read(tmp_path, {**older, "backend": "auto_round:auto_gptq"}) == gptq
    named = {**older, "quant_method": "gptq", "data_type": None}
    assert read(tmp_path, named) == gptq
    kept = {"extra_config": {"model.layers.0.mlp.gate": {"bits": 16, "data_type": "float"}}}
    assert read(tmp_path, {**ROUND, **kept}) == gptq


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing_format": "auto_round:exllamav2"}, "packing_format is .* base model instead"),
        ({"packing_format": None}, "backend is None, of AutoRound Kiln reads only"),
        ({"data_type": "mx_fp"}, "data_type is 'mx_fp'"),
        ({"act_bits": 8}, "act_bits is 8"),
        ({"extra_config": {"lm_head": {"bits": 8}}}, "extra_config.lm_head is .*other bits"),
        ({"super_bits": 6}, "super_bits is 6, Kiln does not know this field"),
    ],
    ids=str,
)
def test_other_forms_of_autoround_are_named(tmp_path, fields: dict[str, Any], message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, {**ROUND, **fields})
