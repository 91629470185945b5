"""Models with 8-bit weights load quantized_gemm only where torch would dequantise some of them."""

from __future__ import annotations

import json

import pytest
import torch
from packers.compressed_tensors import EVERY
from packers.packer import all_packers
from quantised_folders import COMMON, FAMILIES

from kiln.engine.config import EngineConfig, ModelConfig
from kiln.engine.layers import scaled_products
from kiln.engine.models.kernel_needs import dequantises, kernel_needs
from kiln.engine.models.registry import read_model
from kiln.engine.runner.kernels import called_kernels
from kiln.jit_kernels.compile.warmup import jobs_for

PACKERS = {**all_packers(), **{packer.name: packer for packer in EVERY}}
GPUS = {"T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "H100": (9, 0), "B200": (10, 0)}
NO_ROWS, NO_BLOCKS = {"T4", "A100"}, {"T4", "A100", "L4", "B200"}  # products of torch
# By packer: the group of its variants, and GPUs on which torch dequantises a dense model of it.
MODELS = {
    "ct-float-quantized-float-channel-token": ("0", NO_ROWS),
    "ct-float-quantized-float-tensor-static": ("0", NO_ROWS),
    "ct-float-quantized-float-channel-none": ("0", {*GPUS}),
    "fp8-blocks": ("128", NO_BLOCKS),
    "ct-blocks-weights": ("128", {*GPUS}),
    "ct-int-quantized-int-channel-token": ("0", set()),
    "ct-int-quantized-int-channel-none": ("0", {*GPUS}),
    "awq": ("128", {*GPUS}),
    "gptq-8": (None, set()),
    "bf16": (None, set()),
}


@pytest.fixture
def read(tmp_path, environment):
    """Return a function from a packer and a family to a model."""
    environment()

    def model_of(name, family="llama", **more):
        fields = {**COMMON, **FAMILIES[family], **more}
        if name != "bf16":
            fields["quantization_config"] = dict(PACKERS[name].config)
        (tmp_path / "config.json").write_text(json.dumps(fields))
        return read_model(tmp_path)

    return model_of


@pytest.fixture
def device_of(monkeypatch):
    """Return a function from a name of GPUS to such a device."""
    monkeypatch.setattr(torch.version, "cuda", "12.9")

    def device(name):
        monkeypatch.setattr(scaled_products, "_capability", lambda device: GPUS[name])
        scaled_products.has_blocks.cache_clear()
        return torch.device("cuda", 0)

    yield device
    scaled_products.has_blocks.cache_clear()


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", MODELS)
def test_dense_models_need_it_where_torch_has_no_product(read, device_of, name, gpu):
    assert dequantises(read(name)[1], device_of(gpu)) == (gpu in MODELS[name][1])


@pytest.mark.parametrize("name", MODELS)
def test_experts_and_gpus_of_other_machines_need_it(read, device_of, name):
    has_codes = MODELS[name][0] is not None
    assert dequantises(read(name, "qwen3-moe")[1], device_of("H100")) == has_codes
    for device in ("cuda", "cpu"):
        assert dequantises(read(name)[1], torch.device(device)) == has_codes


def test_a_model_quantised_when_it_is_loaded_rounds_too(tmp_path, environment, device_of):
    environment()
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **FAMILIES["llama"]}))
    config = read_model(tmp_path, "fp8")[1]
    assert [dequantises(config, device_of(gpu)) for gpu in ("A100", "H100")] == [True, False]


def test_one_scheme_without_rounding_is_enough(read, device_of):
    """Of compressed-tensors, each group of layers has its own."""
    model = read("ct-float-quantized-float-channel-token")
    fields = json.loads(json.dumps(dict(PACKERS["ct-float-quantized-float-channel-token"].config)))
    (own,) = fields["config_groups"].values()
    plain = {**own, "targets": ["re:.*down_proj"], "input_activations": None}
    fields["config_groups"]["group_1"] = plain
    mixed = read("bf16", quantization_config=fields)
    assert [dequantises(one[1], device_of("H100")) for one in (model, mixed)] == [False, True]


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-int-quantized-int-channel-token", "awq"])
@pytest.mark.parametrize("gpu", ["A100", "H100"])
def test_called_kernels_and_programs(use_gpu, read, device_of, name, gpu):
    use_gpu(f"NVIDIA {gpu}")
    model, device = read(name), device_of(gpu)
    needs = kernel_needs(model[1], torch.bfloat16, torch.bfloat16)
    specs = called_kernels(EngineConfig(ModelConfig("m")), model, device, needs)
    jobs = jobs_for([spec for spec in specs if spec.name == "quantized_gemm"], ["sm_80"], needs)
    group, without = MODELS[name]
    assert len(jobs) == (2 if gpu in without else 0)
    assert {job.variant["group"] for job in jobs} <= {group}
