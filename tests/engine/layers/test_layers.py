"""The layers do what their formulas say."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from projections import dense

from kiln.engine.layers.mlp import GATES, GatedMLP
from kiln.engine.layers.norm import RMSNorm, StreamNorm

FORMULAS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def test_every_activation_is_checked_here():
    assert set(GATES) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_the_mlp_gates_with_the_first_half(name):
    gate_up, down, x = torch.randn(12, 8), torch.randn(8, 6), torch.randn(5, 8)
    mlp = GatedMLP(dense(gate_up, torch.ones(12)), name, dense(down))
    gate, up = (x @ gate_up.T + 1).chunk(2, dim=-1)
    torch.testing.assert_close(mlp(x), FORMULAS[name](gate) * up @ down.T)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_adding_to_the_residual_is_a_sum_and_its_norm(offset):
    x, residual, weight = torch.randn(4, 16), torch.randn(4, 16), torch.randn(16)
    norm = RMSNorm(weight, 0.01, offset)
    total = x + residual
    wanted = total / (total.square().mean(-1, keepdim=True) + 0.01).sqrt() * (offset + weight)
    torch.testing.assert_close(norm(total), wanted)
    x = StreamNorm(weight, 0.01, offset)(x, residual)
    assert torch.equal(residual, total)
    torch.testing.assert_close(x, wanted)


def test_a_norm_rounds_once_alone_and_on_the_residual_stream():
    x, weight = torch.randn(9, 64).bfloat16(), torch.randn(64).bfloat16()
    exact = F.rms_norm(x.double(), (64,), weight.double(), 0.01)
    for kind in (RMSNorm, StreamNorm):
        stream = [torch.zeros_like(x)] if kind is StreamNorm else []
        assert torch.equal(
            kind(weight, 0.01, round_once=True)(x.clone(), *stream), exact.bfloat16()
        )
        assert not torch.equal(kind(weight, 0.01)(x.clone(), *stream), exact.bfloat16())
