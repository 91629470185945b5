"""Codes and scales: their meaning, fused against separate, a product of quantised matrices."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import needs_of
from kiln.jit_kernels.ops.activation.functions import silu_and_mul
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm, rms_norm
from kiln.jit_kernels.ops.quantization.codes import quantised
from kiln.jit_kernels.ops.quantization.functions import (
    fused_add_rms_norm_quant,
    quantize_per_group,
    quantize_per_tensor,
    quantize_per_token,
    rms_norm_quant,
    silu_and_mul_quant,
)
from kiln.jit_kernels.ops.quantization.spec import SPECS
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
FUSED = [torch.bfloat16]  # dtypes that the fused kernels support
QUANTS = [E4M3, INT8]
# (group size, given scale, d): every scheme, held and general rows
SCHEMES = [(0, None, 640), (0, None, 77), (128, None, 640), (0, 0.03, 640), (128, None, 2304)]


def on_host(name, **named):
    spec = find_spec(name)
    host.run(spec, spec.parameters.Arguments(**named), env=settings())


def room(rows, d, dtype, group, given):
    """Uninitialised codes and scales, and the arguments that go with them."""
    scales = torch.empty(1) if given is not None else torch.empty(rows, d // group if group else 1)
    out = torch.empty(rows, d, dtype=dtype)
    return {"out": out, "scales": scales, "scale": given, "group_size": group}


def results(codes):
    return codes["out"], codes["scales"]


def bits(tensor):
    return tensor.view(torch.int8 if tensor.element_size() == 1 else torch.int32)


def assert_same_bits(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(bits(one), bits(other))


def alone(y, dtype, group, given):
    """The codes and scales of the kernel that only quantises."""
    codes = room(*y.shape, dtype, group, given)
    on_host("quantize", **codes, x=y, maxima=None)
    return results(codes)


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", FUSED)
@pytest.mark.parametrize(("group", "given", "d"), SCHEMES)
def test_fused_with_the_norm_is_the_same_bits_as_norm_then_quantise(dtype, quant, group, given, d):
    given = None if given is None else torch.tensor([given])
    x, residual = torch.randn(3, d).mul_(3).to(dtype), torch.randn(3, d).to(dtype)
    weight = torch.randn(d).to(dtype)
    for offset, once in ((0.0, False), (0.0, True), (1.0, False)):
        norm = {"weight": weight, "eps": 1e-6, "weight_offset": offset, "round_once": once}
        y = torch.empty_like(x)
        on_host("rms_norm", out=y, x=x, **norm)
        fused = room(3, d, quant, group, given)
        on_host("rms_norm_quant", **fused, x=x, **norm)
        assert_same_bits(results(fused), alone(y, quant, group, given))

        total, normed = residual.clone(), x.clone()
        on_host("fused_add_rms_norm", x=normed, residual=total, **norm)
        fused, sums = room(3, d, quant, group, given), residual.clone()
        on_host("fused_add_rms_norm_quant", **fused, residual=sums, x=x, **norm)
        assert torch.equal(sums, total)
        assert_same_bits(results(fused), alone(normed, quant, group, given))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype", FUSED)
@pytest.mark.parametrize(("group", "given", "d"), SCHEMES)
def test_fused_with_silu_is_the_same_bits_as_silu_then_quantise(dtype, quant, group, given, d):
    given = None if given is None else torch.tensor([given])
    x, y = torch.randn(3, 2 * d).mul_(3).to(dtype), torch.empty(3, d, dtype=dtype)
    on_host("silu_and_mul", out=y, x=x)
    fused = room(3, d, quant, group, given)
    on_host("silu_and_mul_quant", **fused, x=x)
    assert_same_bits(results(fused), alone(y, quant, group, given))


@pytest.mark.parametrize("quant", QUANTS)
def test_a_kernel_and_torch_give_every_16_bit_pattern_the_same_code(quant):
    y = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    y = y[y.isfinite()].reshape(-1, 256)
    for given in (None, torch.tensor([0.01]), torch.tensor([3e-39]), torch.tensor([1.0])):
        want = quantised(y, quant, given, 0)
        assert_same_bits(alone(y, quant, 0, given), want)


@pytest.mark.parametrize("quant", QUANTS)
def test_what_is_not_finite_shows_in_the_scale_and_a_row_of_zeros_is_zeros(quant):
    y = torch.randn(5, 256).to(torch.bfloat16)
    y[1, 7], y[2, 9], y[3], y[4] = float("nan"), float("-inf"), 0, 1e-38
    for codes, scales in (alone(y, quant, 0, None), quantised(y, quant, None, 0)):
        assert scales[1].isnan()
        assert scales[2].isinf()
        assert torch.equal(codes[3].float() * scales[3], torch.zeros(256))
        assert (codes[4].float() * scales[4] - y[4].float()).abs().max() <= 0.51 * scales[4]
        assert scales[[0, 3, 4]].isfinite().all()
    codes, scales = alone(y, quant, 128, None)
    assert scales.isfinite().sum() == 8, "a group's trouble is its own"


def test_a_row_is_the_same_bits_alone_and_in_any_batch():
    x, weight = torch.randn(300, 256).to(torch.bfloat16), torch.randn(256).to(torch.bfloat16)
    want = None
    for count in (1, 2, 3, 300):
        got, rows = room(count, 256, E4M3, 0, None), x[-count:].clone()
        norm = {"weight": weight, "eps": 1e-6, "weight_offset": 0.0, "round_once": False}
        on_host("rms_norm_quant", **got, x=rows, **norm)
        last = [one[-1:].clone() for one in results(got)]
        want = want or last
        assert_same_bits(last, want)


def close(x, codes, scales, group=0):
    """Assert that codes * scales is x to within half a step of the codes."""
    if group:
        scales = scales.repeat_interleave(group, dim=-1)
    step = 1.0 if codes.dtype == INT8 else 32.0
    assert ((codes.float() * scales - x.float()).abs() <= 0.51 * step * scales).all()


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("shape", [(7, 256), (2, 3, 256), (256,), (0, 256)])
def test_public_functions_take_any_leading_shape(shape, quant):
    x = torch.randn(shape).to(torch.bfloat16)
    codes, scales = quantize_per_token(x, quant)
    assert codes.shape == x.shape
    assert scales.shape == (*shape[:-1], 1)
    close(x, codes, scales)
    codes, scales = quantize_per_group(x, quant)
    assert scales.shape == (*shape[:-1], 2)
    close(x, codes, scales, 128)
    if x.numel():
        codes, scale = quantize_per_tensor(x, dtype=quant)
        assert scale.shape == (1,)
        assert float(scale) == float(x.abs().max().float() / (127 if quant == INT8 else 448))
        close(x, codes, scale)
        again, given = quantize_per_tensor(x, scale, quant)
        assert_same_bits((again, given), (codes, scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *FUSED])
@pytest.mark.parametrize("on_kernels", [False, True])
def test_fused_public_functions_agree_with_the_two_they_stand_for(dtype, on_kernels, monkeypatch):
    seen = []

    def run_kernel(spec, **named):
        a = spec.parameters.Arguments(**named)
        assert spec.has_variant(spec.bind(a).variant)
        seen.append(spec.name)
        host.run(spec, a, env=settings())

    if on_kernels:
        for family in ("quantization", "norm", "activation"):
            monkeypatch.setattr(f"kiln.jit_kernels.ops.{family}.functions.call", run_kernel)
    x, residual, weight = (torch.randn(n, 256).to(dtype) for n in (3, 3, 1))
    weight, x[1] = weight[0], 0
    want = quantize_per_token(rms_norm(x, weight, 1e-6, weight_offset=1.0))
    assert_same_bits(rms_norm_quant(x, weight, 1e-6, 1.0), want)
    normed, total, sums = x.clone(), residual.clone(), residual.clone()
    fused_add_rms_norm(normed, total, weight, 1e-6, round_once=True)
    before = x.clone()
    got = fused_add_rms_norm_quant(x, sums, weight, 1e-6, group_size=128, round_once=True)
    assert_same_bits(got, quantize_per_group(normed))
    assert torch.equal(sums, total)
    assert torch.equal(x, before)
    want = quantize_per_group(silu_and_mul(x))
    codes, scales = silu_and_mul_quant(x, group_size=128, column_major_scales=True)
    assert_same_bits((codes, scales), want)
    assert codes.shape == (3, 128)
    assert scales.shape == (3, 1)
    assert ("fused_add_rms_norm_quant" in seen) == (on_kernels and dtype in FUSED)


def test_a_given_scale_goes_before_groups():
    x, weight, scale = torch.randn(2, 256), torch.rand(256), torch.tensor([0.02])
    x, weight = x.bfloat16(), weight.bfloat16()
    norm = {"x": x, "weight": weight, "eps": 1e-6, "weight_offset": 0.0, "round_once": True}
    want, got = room(2, 256, E4M3, 0, scale), room(2, 256, E4M3, 128, scale)
    on_host("rms_norm_quant", **want, **norm)
    on_host("rms_norm_quant", **got, **norm)
    assert_same_bits(results(got), results(want))
    fused = rms_norm_quant(x, weight, 1e-6, group_size=128, scale=scale, round_once=True)
    assert_same_bits(fused, results(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_only_a_bf16_model_has_fused_kernels_to_build_and_others_do_without(dtype):
    for spec in SPECS:
        alone = spec.name in ("quantize", "tensor_amax")
        assert bool(list(spec.variants(needs_of(dtype)))) == alone == (not spec.has_unfused_path)
        assert list(spec.variants(needs_of(torch.bfloat16)))


@pytest.mark.parametrize("count", [50, 1])
def test_maxima_that_are_no_whole_vectors_are_refused(count):
    codes = room(2, 64, E4M3, 0, torch.ones(1)) | {"scale": None}
    with pytest.raises(ValueError, match=f"{count} maxima"):
        on_host("quantize", **codes, x=torch.randn(2, 64), maxima=torch.rand(count))


def test_scales_can_be_column_major():
    x = torch.randn(6, 512)
    codes, scales = quantize_per_group(x, column_major_scales=True)
    assert scales.stride() == (1, 6)
    assert_same_bits((codes, scales.contiguous()), quantize_per_group(x))


@pytest.mark.parametrize("per_row", [False, True])
def test_a_product_of_quantised_matrices_is_close_to_the_product(per_row):
    x, weight = torch.randn(16, 256), torch.randn(64, 256)
    quantise = quantize_per_token if per_row else quantize_per_tensor
    (a, scale_a), (b, scale_b) = quantise(x), quantise(weight)
    want = x @ weight.T
    scales = {"scale_a": scale_a, "scale_b": scale_b.T if per_row else scale_b}
    try:
        got = torch._scaled_mm(a, b.T, **scales, out_dtype=torch.bfloat16).float()
    except (RuntimeError, NotImplementedError, ValueError):  # not on this CPU, or not of rows
        got = (a.float() * scale_a) @ (b.float() * scale_b).T
    assert (got - want).norm() / want.norm() < 0.05


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        (lambda: quantize_per_token(torch.ones(2, 4).double()), TypeError, "float64"),
        (lambda: quantize_per_token(torch.ones(2, 4), torch.int16), TypeError, "int16"),
        (lambda: quantize_per_token(torch.ones(2, 0)), ValueError, "no elements"),
        (lambda: quantize_per_group(torch.ones(2, 192)), ValueError, "192"),
        (lambda: quantize_per_tensor(torch.ones(2, 4), torch.ones(2)), ValueError, "one float32"),
        (lambda: silu_and_mul_quant(torch.ones(2, 3)), ValueError, "even last dimension"),
        (
            lambda: rms_norm_quant(torch.ones(2, 4), torch.ones(3), 1e-6),
            ValueError,
            "weight",
        ),
        (
            lambda: fused_add_rms_norm_quant(
                torch.ones(2, 4), torch.ones(4, 2).T, torch.ones(4), 1e-6
            ),
            ValueError,
            "contiguous",
        ),
    ],
)
def test_wrong_input_is_refused_by_name(run, error, says):
    with pytest.raises(error, match=says):
        run()


def test_every_scheme_is_among_the_cases_of_every_kernel():
    for spec in SPECS:
        if spec.name != "tensor_amax":
            assert {(s.get("group", 0), bool(s.get("given"))) for s in spec.sizes} >= {
                (0, False), (128, False), (0, True),
            }  # fmt: skip
