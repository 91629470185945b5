"""The programs of skinny_gemm and quantized_gemm that models with quantised weights load."""

from __future__ import annotations

import json
from itertools import product

import pytest
import torch
from kernel_calls import ask_everything
from packers.compressed_tensors import EVERY
from packers.packer import all_packers
from quantised_folders import COMMON, FAMILIES
from tiny.model import all_tiny

from kiln import LLM, SamplingParams
from kiln.engine.cli.main import main
from kiln.engine.config import EngineConfig, ModelConfig
from kiln.engine.layers import few_rows
from kiln.engine.models.kernel_needs import kernel_needs
from kiln.engine.models.registry import read_model
from kiln.engine.runner.kernels import called_kernels
from kiln.jit_kernels.compile.warmup import jobs_for
from kiln.jit_kernels.declare.spec import label
from kiln.jit_kernels.registry import find_spec

GPU = torch.device("cuda")  # any that the built-in table of row limits knows
PLAIN = ("Plain", "Plain", "kNone")
PACKERS = {**all_packers(), **{packer.name: packer for packer in EVERY}}
# By packer: the family, and what skinny_gemm reads besides plain weights and how it is scaled.
MODELS = {
    "bf16": ("llama", None),
    "fp8-blocks": ("llama", ("E4M3", "kByBlock")),
    "ct-float-quantized-float-channel-token": ("qwen3-moe", ("E4M3", "kByOutput")),
    "ct-int-quantized-int-channel-token": ("llama", ("I8", "kByOutput")),
    "ct-int-quantized-int-tensor-static": ("qwen3-moe", ("I8", "kByOutput")),
    "ct-int-quantized-int-channel-none": ("llama", ("I8", "kByOutput")),
    "awq": ("llama", ("U4", "kByBlock")),
    "awq-32": ("qwen3-moe", ("U4", "kBy32")),
    "awq-channel": ("llama", ("U4", "kByOutput")),
    "gptq": ("llama", ("U4", "kByBlock")),
    "gptq-v2-zeros": ("qwen3-moe", ("U4", "kBy64")),
    "gptq-8": ("llama", None),
    "ct-int4-group-128": ("llama", ("U4", "kByBlock")),
    "ct-int4-group-32-asymmetric": ("qwen3-moe", ("U4", "kBy32")),
    "ct-int4-channel": ("llama", ("U4", "kByOutput")),
    "ct-int8-group-32-old": ("llama", None),
    "ct-int8-channel": ("llama", ("I8", "kByOutput")),
    "mxfp4": ("gpt-oss", ("E2M1", "kBy32")),
}
OF_BYTES = ("E4M3", "I8")  # activations may be rounded to these
GROUPS = {"kByOutput": "0", "kBy32": "32", "kBy64": "64", "kByBlock": "128"}


@pytest.fixture
def folder_of(tmp_path):
    """Return a function that writes the config.json of one of MODELS."""

    def write(name):
        family, _ = MODELS[name]
        path = tmp_path / "config.json"
        if family == "gpt-oss":
            all_tiny()["gpt-oss-published"].save(tmp_path, hidden_size=64, intermediate_size=96)
            fields = json.loads(path.read_text())
        else:
            fields = {**COMMON, **FAMILIES[family]}
        if name != "bf16":
            fields["quantization_config"] = dict(PACKERS[name].config)
        path.write_text(json.dumps(fields))
        return tmp_path

    return write


def rounds(name):
    """Whether the inputs of products are rounded, behind norms and activations."""
    codes = MODELS[name][1]
    weights_only = name.endswith("-none") or name == "ct-int8-channel"
    return codes is not None and codes[0] in OF_BYTES and not weights_only


def wanted(name, dtype="kiln::bf16"):
    """Return the programs of one of MODELS as the names of the kernels and their values.

    Plain weights and others, and experts and other layers, are not told apart by each other.
    """
    family, codes = MODELS[name]
    formats = [PLAIN]
    if codes is not None:
        kind, scaled = codes
        of_x = ("Plain", kind) if rounds(name) else ("Plain",)
        formats += [(kind, own, scaled) for own in of_x]
    experts = ("false",) if family == "llama" else ("false", "true")
    programs = {
        ("skinny_gemm", dtype, *format, tiles, own)
        for format, tiles, own in product(formats, "12", experts)
    }
    if family != "gpt-oss" and not rounds(name):  # gpt-oss has no dense layer
        programs |= {
            ("skinny_gemm_silu_and_mul", dtype, *format, tiles, "false", "silu")
            for format, tiles in product(formats, "12")
        }
    if codes is not None:
        of_codes = (codes[0], GROUPS[codes[1]])
        programs |= {("quantized_gemm", dtype, *of_codes, rows) for rows in ("32", "64")}
    return programs


def products_of(programs):
    """Return those of the kernels that multiply."""
    return {one for one in programs if one[0].startswith(("skinny_gemm", "quantized_gemm"))}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_loads_the_products_of_its_weights(folder_of, environment, name):
    environment()
    model = read_model(folder_of(name))
    needs = kernel_needs(model[1], torch.bfloat16, torch.bfloat16)
    codes = MODELS[name][1]
    if codes is not None:
        assert (needs["weight"], needs["scaled"]) == (["Plain", codes[0]], ["kNone", codes[1]])
    assert needs["group"] == ([GROUPS[codes[1]]] if codes is not None else [])
    specs = called_kernels(EngineConfig(ModelConfig("m")), model, GPU, needs)
    assert "skinny_gemm" in {spec.name for spec in specs}
    assert ("quantized_gemm" in {spec.name for spec in specs}) == (codes is not None)
    jobs = jobs_for(specs, ["sm_90a"], needs)
    programs = [(job.spec.name, *job.variant.values()) for job in jobs]
    assert len(set(programs)) == len(programs)
    assert products_of(programs) == wanted(name)


@pytest.mark.parametrize("name", ["bf16", "awq-32", "mxfp4"])
def test_warm_up_lists_the_products_of_a_model(folder_of, environment, capsys, name):
    environment()
    folder = folder_of(name)
    asked = ["warmup", "--arch", "sm_90a", "--dry-run", "--json", "--model", str(folder)]
    assert main([*asked, "--dtype", "bfloat16"]) == 0
    listed = json.loads(capsys.readouterr().out)["names"]
    own = {
        f"{label(spec, dict(zip(spec.params, values, strict=True)))} sm_90a"
        for spec, values in ((find_spec(kernel), values) for kernel, *values in wanted(name))
    }
    assert {one for one in listed if one.startswith(("skinny_gemm", "quantized_gemm"))} == own


# Variants that are loaded but never called. First those of skinny_gemm, as (format, experts) or
# (format, activation): a model's needs list formats, experts and activations separately, so every
# combination is loaded. Then the tile_rows of quantized_gemm. On a CPU skinny_gemm multiplies up
# to 32 rows of each expert, so these models never use the tile of 32 rows.
UNCALLED = {
    "awq": ({("Plain", "silu")}, set()),
    "ct-int4-group-32-asymmetric": ({("Plain", "true"), ("Plain", "silu")}, set()),
    "mxfp4": ({("Plain", "true"), ("E2M1", "false")}, {"32"}),
}


@pytest.mark.parametrize("name", UNCALLED)
def test_what_a_model_calls_was_loaded(kernel_calls, folder_of, monkeypatch, name):
    """With limits of rows as on a GPU that the built-in table knows."""
    monkeypatch.setattr(few_rows, "_is_unlimited", lambda device: False)
    sizes = {"max_model_len": 112, "num_kv_blocks": 80, "max_num_batched_tokens": 512}
    own = {"dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(str(folder_of(name)), device="cpu", **sizes, **own) as llm:
        ask_everything(llm)
        llm.generate([[7] * 20], SamplingParams(max_tokens=2))  # 17 to 32 rows
    loaded, called = products_of(kernel_calls.loaded), products_of(kernel_calls.called)
    assert loaded == wanted(name)
    assert called <= loaded
    formats, rows = UNCALLED[name]
    left = loaded - called
    assert {(one[2], one[-1]) for one in left if one[0] != "quantized_gemm"} == formats
    assert {one[-1] for one in left if one[0] == "quantized_gemm"} == rows


@pytest.mark.parametrize(
    ("name", "codes"),
    [("fp8-blocks", "kiln::e4m3"), ("ct-int-quantized-int-tensor-static", "int8_t")],
)
def test_a_model_that_rounds_has_norms_and_silu_round(kernel_calls, folder_of, name, codes):
    """And the output of attention, for which nothing else does."""
    sizes = {"max_model_len": 112, "num_kv_blocks": 80, "max_num_batched_tokens": 512}
    own = {"dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(str(folder_of(name)), device="cpu", **sizes, **own) as llm:
        ask_everything(llm)
    rounding = {
        (kernel, "kiln::bf16", codes)
        for kernel in ("quantize", "fused_add_rms_norm_quant", "silu_and_mul_quant")
    }
    for programs in (kernel_calls.loaded, kernel_calls.called):
        assert {one for one in programs if find_spec(one[0]).family == "quantization"} == rounding
    has_silu = any(one[0] == "silu_and_mul" for one in kernel_calls.called)
    assert has_silu == ("moe" in MODELS[name][0]), "of experts alone"
