"""What an error of the device means: a lost device, too little memory, or nothing special."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.errors import ConfigError, DeviceError, ModelError
from kiln.engine.runner.failures import explained

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be async"


def raised(device, error):
    try:
        with explained(device, "a step of 9 tokens in 2 requests"):
            raise error
    except Exception as found:
        return found


@pytest.fixture
def sound(monkeypatch):
    """A device that answers after an error."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.fixture
def lost(monkeypatch):
    """A device whose context is broken: every call returns the first error."""

    def fail(device):
        raise RuntimeError(ILLEGAL)

    monkeypatch.setattr(torch.cuda, "synchronize", fail)


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("softmax: launch failed: CUDA_ERROR_OUT_OF_MEMORY"),
    MemoryError(),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=repr)
@pytest.mark.parametrize(
    ("device", "pool"), [(CPU, "kv_memory_gib"), (CUDA, "gpu_memory_utilization")]
)
def test_too_little_memory_names_the_settings_to_lower(sound, device, pool, error):
    found = raised(device, error)
    assert type(found) is ConfigError
    assert f"{device} ran out of memory in a step of 9 tokens in 2 requests" in str(found)
    for name in ("max_num_batched_tokens", "max_num_seqs", pool, "max_model_len"):
        assert name in str(found)


@pytest.mark.parametrize(
    "error", [RuntimeError(ILLEGAL), IndexError("late"), NO_MEMORY[0]], ids=repr
)
def test_a_device_that_no_longer_synchronizes_is_lost(lost, error):
    found = raised(CUDA, error)
    assert type(found) is DeviceError
    assert "cuda:0 failed in a step of 9 tokens" in str(found)
    assert "an illegal memory access was encountered" in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize("device", [CPU, CUDA])
@pytest.mark.parametrize("error", [RuntimeError("CUDA error: invalid argument"), ValueError("x")])
def test_any_other_error_goes_through(sound, device, error):
    assert raised(device, error) is error


def test_a_lost_device_is_not_looked_for_on_a_cpu_or_after_an_error_of_kilns_own(lost):
    plain, own = ValueError("x"), ModelError("x")
    assert raised(CPU, plain) is plain
    assert raised(CUDA, own) is own
