"""The public functions accept arrays of other libraries without copying them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kiln.jit_kernels.ops.activation.functions import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm, rms_norm
from kiln.jit_kernels.ops.rotary.functions import apply_rotary
from kiln.jit_kernels.ops.rotary.table import rotary_table

GENERATOR = np.random.default_rng(0)


def array(*shape):
    return GENERATOR.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("function", [silu_and_mul, gelu_and_mul, gelu_tanh_and_mul])
def test_activations(function):
    x, out = array(3, 8), np.zeros((3, 4), np.float32)
    want = function(torch.from_numpy(x))
    result = function(x)
    assert isinstance(result, torch.Tensor)
    assert torch.equal(result, want)
    assert function(x, out) is out
    assert np.array_equal(out, want.numpy())
    out[:] = 0
    assert function(x, out=out) is out
    assert np.array_equal(out, want.numpy())


def test_rms_norm_mixes_arrays_and_tensors():
    x, weight, out = array(3, 8), torch.rand(8), np.empty((3, 8), np.float32)
    want = rms_norm(torch.from_numpy(x), weight, 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), want)
    assert rms_norm(x, weight, 1e-6, out=out) is out
    assert np.array_equal(out, want.numpy())
    assert rms_norm(x, weight, 1e-6, x) is x, "in place"
    assert np.array_equal(x, want.numpy())
    tensor = torch.empty(3, 8)
    assert rms_norm(out, weight, 1e-6, tensor) is tensor


def test_functions_that_work_in_place_write_in_the_array():
    x, residual, weight = array(3, 8), array(3, 8), array(8)
    tensors = [torch.from_numpy(one.copy()) for one in (x, residual, weight)]
    fused_add_rms_norm(*tensors, 1e-5)
    assert fused_add_rms_norm(x, residual, weight, 1e-5) is None
    assert np.array_equal(x, tensors[0].numpy())
    assert np.array_equal(residual, tensors[1].numpy())

    positions, query, key = np.arange(3), array(3, 2, 8), array(3, 1, 8)
    table = rotary_table(8, 16, 10000.0)
    tensors = [torch.from_numpy(one.copy()) for one in (positions, query, key)]
    apply_rotary(*tensors, table)
    apply_rotary(positions, query, key, table)
    assert np.array_equal(query, tensors[1].numpy())
    assert np.array_equal(key, tensors[2].numpy())


def test_strided_arrays_are_written_where_they_lie():
    wide = np.full((3, 7), np.nan, np.float32)
    x = array(3, 8)
    assert silu_and_mul(x, wide[:, :4]) is not None
    assert np.array_equal(wide[:, :4], silu_and_mul(torch.from_numpy(x)).numpy())
    assert np.isnan(wide[:, 4:]).all()


def test_an_array_that_cannot_be_shared_is_refused_by_name():
    locked = array(3, 8)
    locked.flags.writeable = False
    with pytest.raises(TypeError, match="silu_and_mul: an array is read-only"):
        silu_and_mul(array(3, 16), locked)
    with pytest.raises(TypeError, match=r"silu_and_mul: an array of numpy"):
        silu_and_mul(np.array(["text"]))
    with pytest.raises(TypeError, match="float64"):
        silu_and_mul(array(3, 8).astype(np.float64))
    with pytest.raises(ValueError, match=r"\[3, 3\]"):
        silu_and_mul(array(3, 8), out=array(3, 3))


class Foreign:
    """An array of an unknown library that supports DLPack."""

    def __init__(self, tensor):
        self._tensor = tensor

    def __dlpack__(self, **wishes):
        return self._tensor.__dlpack__(**wishes)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_anything_that_speaks_dlpack_is_an_array(dtype):
    x = torch.randn(3, 8).to(dtype)
    out = Foreign(torch.empty(3, 4, dtype=dtype))
    assert silu_and_mul(Foreign(x), out) is out
    assert torch.equal(out._tensor, silu_and_mul(x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cupy_arrays_on_the_gpu():
    cupy = pytest.importorskip("cupy")
    x, weight = torch.randn(64, 512, device="cuda"), torch.rand(512, device="cuda")
    want = rms_norm(x, weight, 1e-6)
    out = cupy.empty((64, 512), cupy.float32)
    assert rms_norm(cupy.asarray(x), weight, 1e-6, out) is out
    assert torch.equal(torch.from_dlpack(out), want)
    fused = cupy.asarray(x.clone()), cupy.asarray(x.clone())
    fused_add_rms_norm(*fused, cupy.asarray(weight), 1e-5)
    assert torch.equal(torch.from_dlpack(fused[1]), x + x)
    half = cupy.zeros((64, 256), cupy.float32)
    assert silu_and_mul(cupy.asarray(x), out=half) is half
    assert torch.equal(torch.from_dlpack(half), silu_and_mul(x))
