"""Layer norms compute what those of transformers do, alone and on the residual stream."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F

from kiln.engine.layers.layer_norm import LayerNorm, StreamLayerNorm

COHERE = ("cohere2", "Cohere2LayerNorm", 0.0)
NEMOTRON = ("nemotron", "NemotronLayerNorm1P", 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("family", "kind", "offset"), [COHERE, NEMOTRON])
def test_agrees_with_transformers(dtype, family, kind, offset):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, kind)(200, eps=1e-5).to(dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    bias = theirs.bias.detach() if family == "nemotron" else None
    ours = LayerNorm(theirs.weight.detach(), bias, 1e-5, offset)
    x = torch.randn(7, 200).mul_(3).add_(0.5).to(dtype)
    with torch.inference_mode():
        want = theirs(x)
    if dtype == torch.float32:
        torch.testing.assert_close(ours(x), want, rtol=1e-6, atol=1e-6)
    else:  # The error of float32 changes a result only if it is nearly halfway between two numbers.
        assert (ours(x) != want).float().mean() < 0.005


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_16_bit_norm_is_rounded_once(has_bias):
    x, weight = torch.randn(20, 300).bfloat16(), torch.randn(300).bfloat16()
    bias = torch.randn(300).bfloat16() if has_bias else None
    wide = None if bias is None else bias.double()
    exact = F.layer_norm(x.double(), (300,), weight.double(), wide, 1e-5)
    differ = LayerNorm(weight, bias, 1e-5)(x) != exact.bfloat16()
    assert differ.float().mean() < 0.005


def test_on_the_residual_stream_it_is_a_sum_and_its_norm():
    x, residual, weight, bias = torch.randn(4, 16), torch.randn(4, 16), *torch.randn(2, 16)
    norm, want = LayerNorm(weight, bias, 1e-5, 1.0), x + residual
    got = StreamLayerNorm(norm)(x, residual)
    assert torch.equal(residual, want)
    assert torch.equal(got, norm(want))
    exact = F.layer_norm(want.double(), (16,), weight.double() + 1, bias.double(), 1e-5)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)
