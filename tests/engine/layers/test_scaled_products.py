"""Products of int8 codes by torch: those of float32 arithmetic on exact sums, rounded once."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.layers import scaled_products
from kiln.engine.layers.scaled_products import multiply_rows


@pytest.fixture(autouse=True)
def has_int8(monkeypatch):
    """A CPU that has the product, as a GPU does."""
    monkeypatch.setattr(scaled_products, "has_rows", lambda device, dtype: True)
    torch.manual_seed(4)


def product(rows: int, outputs: int, inputs: int, dtype: torch.dtype):
    """Return the arguments of multiply_rows, with an out of NaN."""
    codes = torch.randint(-128, 128, (rows, inputs), dtype=torch.int8)
    weight = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    scales, of_weight = torch.rand(rows, 1) + 0.01, (torch.rand(outputs, 1) + 0.01) / inputs
    out = torch.full((rows, outputs), torch.nan, dtype=dtype)
    return codes, scales, weight, of_weight, out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 8, 64), (16, 40, 24), (75, 64, 1032)])
def test_sums_are_exact_and_rounded_once(dtype, rows, outputs, inputs):
    codes, scales, weight, of_weight, out = product(rows, outputs, inputs, dtype)
    assert multiply_rows(codes, scales, weight, of_weight, out)
    sums = (codes.long() @ weight.long().T).float()
    assert torch.equal(out, (sums * scales * of_weight.T).to(dtype))


def test_one_scale_may_stand_for_all_rows():
    codes, scales, weight, of_weight, out = product(20, 16, 64, torch.bfloat16)
    alike = scales[:1].expand(20, 1)
    assert multiply_rows(codes, alike, weight, of_weight, out)
    repeated = torch.empty_like(out)
    assert multiply_rows(codes, alike.contiguous(), weight, of_weight, repeated)
    assert torch.equal(out, repeated)


@pytest.mark.parametrize(("outputs", "inputs"), [(12, 64), (16, 60)])
def test_other_sizes_and_outs_are_refused(outputs, inputs):
    assert not multiply_rows(*product(20, outputs, inputs, torch.bfloat16))
    codes, scales, weight, of_weight, out = product(20, 16, 64, torch.bfloat16)
    assert not multiply_rows(codes, scales, weight, of_weight, out.T.contiguous().T)
