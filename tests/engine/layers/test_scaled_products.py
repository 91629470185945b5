"""Products of 8-bit codes by torch: the arguments it gets, and the outputs."""

from __future__ import annotations

import pytest
import torch

from kiln.engine.layers import scaled_products
from kiln.engine.layers.scaled_products import multiply_blocks, multiply_rows


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


@pytest.mark.parametrize(
    ("rows", "dtype", "fast"),
    [
        (128, torch.bfloat16, False),
        (129, torch.bfloat16, True),
        (2048, torch.float16, False),
    ],
)
def test_only_many_rows_in_bf16_use_fast_accumulation(monkeypatch, rows, dtype, fast):
    asked = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **named: asked.append(named))
    codes = torch.zeros(rows, 32, dtype=torch.float8_e4m3fn)
    weight = torch.zeros(16, 32, dtype=torch.float8_e4m3fn)
    out = torch.empty(rows, 16, dtype=dtype)
    assert multiply_rows(codes, torch.ones(rows, 1), weight, torch.ones(16, 1), out)
    assert [one["use_fast_accum"] for one in asked] == [fast]


@pytest.mark.parametrize("rows", [1, 4, 6, 8])
@pytest.mark.parametrize("gap", [0, 16])
def test_blocks_are_written_to_any_out(monkeypatch, rows, gap):
    def blocks(codes, weight, scales, a, b, of_weight, c, d, bias, dtype, *, out):
        """Multiply as torch does on a GPU, which takes four rows at a time and a dense out."""
        assert len(codes) % 4 == 0
        assert out.is_contiguous()
        assert scales[0].stride() == (1, len(codes))
        left = codes.float() * scales[0].repeat_interleave(128, 1)
        right = weight.T.float() * of_weight[0].T.repeat_interleave(128, 1)[: len(weight.T)]
        out.copy_(left @ right.T)

    monkeypatch.setattr(torch, "_scaled_mm_v2", blocks)
    monkeypatch.setattr(scaled_products, "has_blocks", lambda device: True)
    codes, weight = (torch.randn(size, 256).to(torch.float8_e4m3fn) for size in (rows, 128))
    scales, of_weight = torch.rand(2, rows).T, torch.rand(1, 2)
    out = torch.full((rows, 128 + gap), torch.nan, dtype=torch.bfloat16)[:, :128]
    assert multiply_blocks(codes, scales, weight, of_weight, out)
    want = (codes.float() * scales.repeat_interleave(128, 1)) @ (
        weight.float() * of_weight.repeat_interleave(128, 1)
    ).T
    torch.testing.assert_close(out.float(), want, rtol=8e-3, atol=1e-3)
