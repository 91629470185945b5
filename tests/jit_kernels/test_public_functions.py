"""The functions that models call: shapes, strides, dtypes, and errors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kiln.jit_kernels.ops.activation.functions import (
    clamped_swiglu,
    gelu_and_mul,
    gelu_tanh_and_mul,
    silu_and_mul,
)
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm, rms_norm
from kiln.jit_kernels.ops.rotary.functions import apply_rotary
from kiln.jit_kernels.ops.rotary.table import rotary_table

ACTIVATIONS = [
    (silu_and_mul, F.silu),
    (gelu_and_mul, F.gelu),
    (gelu_tanh_and_mul, lambda x: F.gelu(x, approximate="tanh")),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def close(got, want, dtype=torch.float32):
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("function", "activation"), ACTIVATIONS)
@pytest.mark.parametrize("shape", [(6,), (3, 10), (2, 3, 14), (0, 8), (2, 0, 8)])
def test_activation_takes_any_leading_shape(function, activation, shape, dtype):
    x = torch.randn(shape).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    result = function(x)
    assert result.shape == (*shape[:-1], shape[-1] // 2)
    assert result.dtype == dtype
    close(result, activation(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_clamped_swiglu_is_that_of_gpt_oss(dtype):
    x = (torch.randn(3, 20) * 4).to(dtype)
    x[0, 0], x[1, 11] = float("nan"), float("nan")
    gate, up = x.double().chunk(2, dim=-1)
    gate, up = gate.clamp(max=2.5), up.clamp(-2.5, 2.5)
    got, want = clamped_swiglu(x, 1.7, 2.5), (up + 1) * gate * torch.sigmoid(gate * 1.7)
    assert torch.equal(got.isnan(), want.isnan())
    close(got.nan_to_num(), want.nan_to_num(), dtype)


def test_activation_writes_where_it_is_told():
    x, out = torch.randn(4, 12), torch.full((4, 9), float("nan"))
    returned = silu_and_mul(x, out[:, :6])
    assert returned.data_ptr() == out.data_ptr()
    close(out[:, :6], F.silu(x[:, :6]) * x[:, 6:])
    assert out[:, 6:].isnan().all()


def test_activation_takes_rows_that_no_view_can_reach():
    x = torch.randn(3, 12, 5).transpose(1, 2)  # the last dimension is strided
    out = torch.empty(3, 6, 5).transpose(1, 2)
    close(silu_and_mul(x, out), F.silu(x[..., :6]) * x[..., 6:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 8), (0, 8)])
def test_rms_norm_takes_any_leading_shape(shape, dtype):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    wide = x.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    close(rms_norm(x, weight, 1e-6), want, dtype)


def test_rms_norm_works_in_place():
    x, weight = torch.randn(4, 8), torch.rand(8)
    want = rms_norm(x, weight, 1e-6)
    assert rms_norm(x, weight, 1e-6, out=x) is x
    assert torch.equal(x, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rms_norm_is_add_then_norm_bit_for_bit(dtype):
    x, residual = torch.randn(2, 3, 40).to(dtype), torch.randn(2, 3, 40).to(dtype)
    weight = torch.randn(40).to(dtype)
    total = x + residual
    want = rms_norm(total, weight, 1e-5)
    assert fused_add_rms_norm(x, residual, weight, 1e-5) is None
    assert torch.equal(residual, total)
    assert torch.equal(x, want)


def test_apply_rotary_turns_pairs_by_the_angle_of_their_position():
    table = rotary_table(8, 32, 10000.0)
    positions = torch.tensor([0, 5, 31])
    qkv = torch.randn(3, 4 * 10)
    query, key = qkv[:, :20].view(3, 2, 10), qkv[:, 20:].view(3, 2, 10)
    before = query.clone(), key.clone()
    apply_rotary(positions, query, key, table)
    for got, x in zip((query, key), before, strict=True):
        pairs = torch.complex(x[..., :4].double(), x[..., 4:8].double())
        angle = positions[:, None, None] * 10000.0 ** (-torch.arange(4) / 4)
        turned = pairs * torch.polar(torch.ones_like(angle.double()), angle.double())
        close(got, torch.cat((turned.real, turned.imag, x[..., 8:]), -1))
    assert torch.equal(query[0], before[0][0]), "position 0 turns by nothing"


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        (lambda: silu_and_mul(torch.ones(2, 3)), ValueError, "even last dimension"),
        (lambda: silu_and_mul(torch.ones(2, 4).double()), TypeError, "float64"),
        (lambda: silu_and_mul(torch.ones(2, 4), torch.ones(2, 3)), ValueError, r"\[2, 3\]"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6), ValueError, "weight"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(4).half(), 1e-6), TypeError, "weight"),
        (
            lambda: fused_add_rms_norm(torch.ones(4, 2).T, torch.ones(4, 2).T, torch.ones(4), 1e-6),
            ValueError,
            "contiguous",
        ),
        (
            lambda: apply_rotary(
                torch.ones(2, dtype=torch.int32), *[torch.ones(2, 1, 4)] * 2, torch.ones(9, 4)
            ),
            TypeError,
            "int64",
        ),
        (
            lambda: apply_rotary(
                torch.ones(3, dtype=torch.int64), *[torch.ones(2, 1, 4)] * 2, torch.ones(9, 4)
            ),
            ValueError,
            "first dimension",
        ),
        (
            lambda: apply_rotary(
                torch.ones(2, dtype=torch.int64), *[torch.ones(2, 1, 4)] * 2, torch.ones(9, 6)
            ),
            ValueError,
            "at most head_dim",
        ),
    ],
)
def test_wrong_input_is_refused_by_name(run, error, says):
    with pytest.raises(error, match=says):
        run()


def test_operators_survive_torch_compile():
    def block(x, residual, weight):
        fused_add_rms_norm(x, residual, weight, 1e-5)
        return silu_and_mul(x) + 1

    x, residual, weight = torch.randn(4, 16), torch.randn(4, 16), torch.rand(16)
    want = block(x.clone(), residual.clone(), weight)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    close(compiled(x.clone(), residual.clone(), weight), want)
