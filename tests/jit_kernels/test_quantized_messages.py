"""What the product with quantised weights refuses, by name."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.ops.quantized_linear.spec import QUANTIZED_GEMM


def plain(**changes):
    """Arguments of the operator that are fine but for the changes."""
    sizes = {"rows": 4, "outputs": 12, "inputs": 200, "experts": 0, "zeros": 1}
    a = QUANTIZED_GEMM.make_arguments(next(QUANTIZED_GEMM.variants()), sizes, "cpu")
    return a._replace(**{name: change(a) for name, change in changes.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": lambda a: a.x[:0], "out": lambda a: a.out[:0]}, "x is 0 x 200; want rows of a"),
        ({"x": lambda a: a.x[:, :196]}, "x is 4 x 196; want rows of a multiple of 8"),
        ({"x": lambda a: a.x.float()}, "x of torch.float32 and out of torch.bfloat16; want bf16"),
        ({"x": lambda a: torch.ones(200, 4).bfloat16().T}, "elements of a row are not side by"),
        ({"x": lambda a: torch.ones(4, 204).bfloat16()[:, 4:]}, "rows of x do not begin at mult"),
        ({"tile_rows": lambda a: 16}, "tile_rows is 16; want 32 or 64"),
        ({"codes": lambda a: a.codes[:, :64]}, "shapes that do not fit each other"),
        ({"scales": lambda a: a.scales[:5]}, "shapes that do not fit each other"),
        ({"codes": lambda a: a.codes[None], "scales": lambda a: a.scales[None]}, "shapes that do"),
        ({"out": lambda a: a.out[:, :11]}, r"out is \[4, 11\]; want \[4, 12\]"),
        ({"scales": lambda a: a.scales.double()}, "codes of torch.uint8 and scales of torch.float"),
        ({"scales": lambda a: a.scales[:, :3].contiguous()}, "3 scales of 256 padded inputs; want"),
        ({"scales": lambda a: a.scales.byte()}, "zero points beside codes of torch.uint8 and sc"),
        ({"zeros": lambda a: a.zeros.int()}, "zeros is .* of torch.int32; want .* of torch.int16"),
        ({"bias": lambda a: torch.ones(12)}, r"bias is \[12\] of torch.float32; want \[12\] of"),
        ({"scales": lambda a: a.scales.T.contiguous().T}, "scales is not contiguous"),
        ({"codes": lambda a: unaligned(a.codes)}, "codes does not begin at a multiple of 16"),
    ],
)
def test_it_names_what_it_cannot_multiply(change, message):
    with pytest.raises(ValueError, match=f"^quantized_gemm: {message}"):
        QUANTIZED_GEMM.bind(plain(**change))


def of_bytes(needs=None, sizes=None, **changes):
    """The same with 8-bit codes."""
    sizes = {"rows": 4, "outputs": 12, "inputs": 208, "experts": 0, **(sizes or {})}
    variant = next(QUANTIZED_GEMM.variants(needs or {"weight": "E4M3", "group": "128"}))
    a = QUANTIZED_GEMM.make_arguments(variant, sizes, "cpu")
    return a._replace(**{name: change(a) for name, change in changes.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": lambda a: a.codes[:, :192]}, "shapes that do not fit each other"),
        ({"codes": lambda a: a.codes.view(torch.float8_e5m2)}, "shapes that do not fit each other"),
        ({"scales": lambda a: a.scales.expand(2, 2)}, "shapes that do not fit each other"),
        ({"scales": lambda a: a.scales.double()}, "codes of torch.float8_e4m3fn and scales of tor"),
        ({"scales": lambda a: a.scales.byte()}, "codes of torch.float8_e4m3fn and scales of torch"),
        ({"codes": lambda a: a.codes.view(torch.int8)}, "2 scales of 208 inputs with .*; want 1$"),
        ({"scales": lambda a: a.scales[:, :0]}, "0 scales of 208 inputs with .*; want 1, or 2 or"),
        ({"scales": lambda a: sparse(a.scales)}, "scales is not contiguous"),
        ({"zeros": lambda a: a.scales.short()}, "zero points beside codes of torch.float8_e4m3fn"),
        ({"codes": lambda a: unaligned(a.codes)}, "codes does not begin at a multiple of 16"),
        ({"codes": lambda a: strided(a.codes, 216)}, r"codes have strides \(216, 1\); want rows"),
        ({"codes": lambda a: strided(a.codes, 2**25)}, r"codes have strides \(33554432, 1\); want"),
        ({"codes": lambda a: a.codes[:1].expand(12, -1)}, r"codes have strides \(0, 1\); want"),
        ({"codes": lambda a: strided(a.codes, 1, 12)}, r"codes have strides \(1, 12\); want"),
    ],
)
def test_it_names_what_it_cannot_multiply_of_8_bits(change, message):
    with pytest.raises(ValueError, match=f"^quantized_gemm: {message}"):
        QUANTIZED_GEMM.bind(of_bytes(**change))


def test_rows_and_experts_of_8_bits_have_their_places():
    with pytest.raises(ValueError, match="codes of 8 bits in rows of 200; want a multiple of 16"):
        QUANTIZED_GEMM.bind(of_bytes(sizes={"inputs": 200}))
    a = of_bytes(sizes={"experts": 3, "rows": 9})
    with pytest.raises(ValueError, match=r"strides \(4992, 208, 1\); want experts right behind"):
        QUANTIZED_GEMM.bind(a._replace(codes=apart(a.codes)))
    for outputs in (1, 12):
        gap = of_bytes(sizes={"experts": 3, "rows": 9, "outputs": outputs, "gap": 1})
        assert QUANTIZED_GEMM.bind(gap).derived["code_stride"] == 224
    one = of_bytes(sizes={"outputs": 1})
    assert QUANTIZED_GEMM.bind(one).derived["outputs_log2"] == 0
    assert QUANTIZED_GEMM.bind(of_bytes()).derived["outputs_log2"] == 7


def test_experts_have_no_bias_and_an_end_each():
    sizes = {"rows": 14, "outputs": 20, "inputs": 144, "experts": 3}
    a = QUANTIZED_GEMM.make_arguments(next(QUANTIZED_GEMM.variants()), sizes, "cpu")
    with pytest.raises(ValueError, match="a bias beside experts"):
        QUANTIZED_GEMM.bind(a._replace(bias=torch.ones(20).bfloat16()))
    with pytest.raises(ValueError, match=r"ends is \[2\] of torch.int32; want \[3\] of"):
        QUANTIZED_GEMM.bind(a._replace(ends=a.ends[:2]))


def unaligned(tensor):
    return torch.empty(tensor.numel() + 8, dtype=tensor.dtype)[8:].view_as(tensor)


def strided(tensor, *strides):
    """Return a tensor with other strides; what it holds does not matter."""
    strides = (*strides, 1)[:2]
    size = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, strides, strict=True))
    return torch.empty(size, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def sparse(tensor):
    return tensor.repeat_interleave(2, -1)[..., ::2]


def apart(codes):
    """Return the codes of experts with as many others behind those of each."""
    return torch.cat([codes.view(torch.uint8)] * 2, 1)[:, : codes.shape[1]].view(codes.dtype)
