"""Where a model runs: automatic choices, and refusals that say what is there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kiln.engine.errors import ConfigError
from kiln.engine.models.hf_config import Traits
from kiln.engine.runner.device import resolve_device, resolve_dtype


@pytest.fixture
def gpus(monkeypatch):
    def there(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return there


@pytest.mark.parametrize(
    ("count", "name", "device"),
    [
        (0, "auto", "cpu"),
        (2, "auto", "cuda:0"),
        (2, "cuda", "cuda:0"),
        (2, "cuda:1", "cuda:1"),
        (2, "cpu", "cpu"),
    ],
)
def test_a_device_is_found(gpus, count, name, device):
    gpus(count)
    assert resolve_device(name) == torch.device(device)


@pytest.mark.parametrize(
    ("count", "name", "message"),
    [
        (0, "cuda", "sees no CUDA device"),
        (0, "cuda:0", "sees no CUDA device"),
        (2, "cuda:2", "'cuda:2': 2 CUDA devices"),
        (2, "cuda:x", "'cuda:x': 2 CUDA devices"),
    ],
)
def test_a_device_that_is_not_there_is_a_config_error(gpus, count, name, message):
    gpus(count)
    with pytest.raises(ConfigError, match=message):
        resolve_device(name)


def of_dtype(dtype, **traits):
    """A model, as far as its dtype is concerned."""
    return SimpleNamespace(dtype=dtype, traits=Traits(**traits))


def test_auto_is_the_checkpoints_dtype_on_a_gpu_and_float32_on_a_cpu():
    cpu, gpu, model = torch.device("cpu"), torch.device("cuda", 0), of_dtype(torch.bfloat16)
    assert resolve_dtype("auto", model, gpu) == torch.bfloat16
    assert resolve_dtype("auto", model, cpu) == torch.float32
    assert resolve_dtype("float16", model, cpu) == torch.float16
    assert resolve_dtype("float32", model, gpu) == torch.float32


def test_a_model_that_overflows_float16_is_refused_in_it():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    model = of_dtype(torch.float16, overflows_float16=True)
    told = {"float16": "dtype='float16': ", "auto": "dtype='auto', which is float16"}
    for name, why in told.items():
        with pytest.raises(ConfigError, match=f"{why}.*65,504.*use dtype bfloat16, or float32"):
            resolve_dtype(name, model, gpu)
    assert resolve_dtype("auto", model, cpu) == torch.float32
    assert resolve_dtype("bfloat16", model, gpu) == torch.bfloat16
