"""What the product of a few rows refuses, by name."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.ops.linear.functions import skinny_gemm
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM

CODE = torch.float8_e4m3fn


def codes(rows, columns, gap=0):
    return torch.zeros(rows, columns + gap, dtype=torch.uint8)[:, :columns].view(CODE)


@pytest.mark.parametrize(
    ("x", "weight", "columns", "message"),
    [
        (torch.ones(0, 64), torch.ones(8, 64), 0, "x is 0 x 64; want 1 to 16 rows"),
        (torch.ones(17, 64), torch.ones(8, 64), 0, "x is 17 x 64; want 1 to 16 rows"),
        (torch.ones(2, 96), codes(8, 96), 1, "codes in rows of 96; want a multiple of 64"),
        (codes(2, 192), codes(8, 192), 2, "codes in rows of 192; want a multiple of 128"),
        (codes(2, 64, 8), codes(8, 64), 1, "rows of x do not begin and end at"),
        (codes(2, 64), codes(8, 64, 8), 1, "rows of weight do not begin and end at"),
        (torch.ones(2, 64), torch.ones(8, 32), 0, "shapes that do not fit each other"),
        (torch.ones(64, 2).T, torch.ones(8, 64), 0, "elements of a row are not side by side"),
        (torch.ones(2, 64), codes(8, 64), 0, r"codes in \['weight'\] and scales of \[\]"),
        (codes(2, 64), torch.ones(8, 64), 1, r"codes in \['x'\] and scales of \['x'\]"),
    ],
)
def test_it_names_what_it_cannot_multiply(x, weight, columns, message):
    out = torch.empty(len(x), len(weight), dtype=torch.bfloat16)
    scales, x_scales = (
        torch.ones(len(one), columns) if columns and one.dtype == CODE else None
        for one in (weight, x)
    )
    x, weight = (one if one.dtype == CODE else one.bfloat16() for one in (x, weight))
    with pytest.raises(ValueError, match=f"^skinny_gemm: .*{message}"):
        skinny_gemm(x, weight, out, scales=scales, x_scales=x_scales)


def of(weight, input_="Plain", scaled=None, **sizes):
    """Arguments that fit each other; of experts if sizes say so."""
    kind = "true" if "grouped" in sizes else "false"
    needs = {"weight": weight, "input": input_, "experts": kind} | (
        {"scaled": scaled} if scaled else {}
    )
    variant = next(SKINNY_GEMM.variants({**needs, "tiles": "1"}))
    sizes = {"outputs": 12, "inputs": 200, "zeros": 1, "bias": 1, **sizes}
    sizes |= {} if "grouped" in sizes else {"rows": 4}
    return SKINNY_GEMM.make_arguments(variant, sizes, "cpu")


def experts():
    return of("U4", scaled="kBy32", grouped=9, experts=4)


def fine():
    return of("U4", scaled="kBy32")


def eight(input_="Plain", scaled="kByOutput"):
    return of("E4M3", input_, scaled)


def int8():
    return of("I8", "I8")


def apart(tensor):
    """Return the same tensor with other strides."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def moved(tensor):
    """Return the same tensor behind an address that is aligned."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view_as(tensor).copy_(tensor)


@pytest.mark.parametrize(
    ("made", "name", "change", "message"),
    [
        (experts, "ends", None, r"9 rows and weights \[4, 12, 128\], but ends \[\]"),
        (experts, "expert_of", None, r"9 rows and weights \[4, 12, 128\], but expert_of \[\]"),
        (experts, "ends", lambda one: one[:3], r"and weights \[4, 12, 128\], but ends \[3\]"),
        (experts, "expert_of", lambda one: one[:5], r"9 rows and .*, but expert_of \[5\]"),
        (experts, "weight", lambda one: one[0], r"and weights \[12, 128\], but ends \[4\]"),
        (fine, "ends", lambda _: torch.tensor(4).int(), r"and weights .*, but ends \[\]"),
        (fine, "weight", lambda one: one[None], r"and weights \[1, 12, 128\], but ends \[\]"),
        (experts, "ends", torch.Tensor.long, "ends of torch.int64; want contiguous torch.int32"),
        (experts, "expert_of", torch.Tensor.long, "expert_of of torch.int64; want contiguous"),
        (experts, "ends", apart, "ends of torch.int32; want contiguous torch.int32"),
        (experts, "tiles", lambda _: 3, "3 tiles of 8 for 9 rows; want at most 2"),
        (experts, "tiles", lambda _: 0, "0 tiles of 8 for 9 rows; want at most 2"),
        (
            experts,
            "scales",
            lambda one: one[0],
            r"zeros \[4, 12, 8\] beside weights of torch.uint8",
        ),
        (
            experts,
            "bias",
            lambda one: one[0],
            r"bias \[12\] is not contiguous, or not of \[4, 12\]",
        ),
        (fine, "bias", apart, r"bias \[12\] is not contiguous, or not of \[12\]"),
        (fine, "bias", torch.Tensor.float, "bias of torch.float32 beside out of torch.bfloat16"),
        (fine, "x", lambda one: one[0], r"x \[200\] and weight \[12, 128\] are not of rows"),
        (fine, "x", torch.Tensor.half, "torch.float16 beside out of torch.bfloat16"),
        (fine, "x", lambda one: one[:, 8:136], "shapes that do not fit each other"),
        (fine, "x", moved, "beside codes, rows of x do not begin and end at"),
        (fine, "x", lambda one: one[:, :197], "beside codes, rows of x do not begin and end at"),
        (fine, "weight", moved, "beside codes, rows of weight do not begin and end at"),
        (fine, "weight", lambda one: one[:, :64], "shapes that do not fit each other"),
        (fine, "weight", lambda one: one[:5], "shapes that do not fit each other"),
        (fine, "scales", None, r"codes in \['weight'\] and scales of \[\]"),
        (fine, "zeros", lambda one: one[:, :1], r"zeros \[12, 1\] beside weights of torch.uint8"),
        (fine, "zeros", torch.Tensor.int, "zeros of torch.int32; want torch.int16"),
        (fine, "zeros", apart, "scales or zeros are not contiguous"),
        (fine, "scales", apart, "scales or zeros are not contiguous"),
        (fine, "scales", moved, "scales do not begin at a multiple of 16 bytes"),
        (fine, "scales", torch.Tensor.double, r"scales \[12, 8\] of torch.float64 beside weights"),
        (fine, "scales", torch.Tensor.byte, "or e2m1 with zero points"),
        (eight, "zeros", lambda _: torch.zeros(12, 1).short(), "zeros .* beside weights of .*8_e4"),
        (eight, "scales", lambda one: one[:5], r"scales \[5, 1\] of .* beside weights \[12, 256\]"),
        (eight, "scales", torch.Tensor.bfloat16, r"scales \[12, 1\] of torch.bfloat16 beside"),
        (int8, "x", lambda one: one[:, :96], "shapes that do not fit each other"),
        (int8, "scales", None, r"codes in \['x', 'weight'\] and scales of \['x'\]"),
        (
            int8,
            "scales",
            lambda one: one.expand(12, 2).contiguous(),
            r"scales \[12, 2\] of torch.float32 beside weights \[12, 256\] of torch.int8",
        ),
        (int8, "scales", lambda one: one[:1], r"scales \[1, 1\] of .* beside .* of torch.int8"),
        (int8, "x_scales", lambda one: one[:3], r"x_scales \[3, 1\] of .*; want \[4, 1\]"),
        (int8, "weight", moved, "beside codes, rows of weight do not begin and end at"),
    ],
)
def test_it_names_the_argument_that_does_not_fit(made, name, change, message):
    a = made()
    SKINNY_GEMM.bind(a)
    changed = None if change is None else change(getattr(a, name))
    with pytest.raises(ValueError, match=f"^skinny_gemm: .*(?:{message})"):
        SKINNY_GEMM.bind(a._replace(**{name: changed}))


@pytest.mark.parametrize(
    ("weight", "columns", "message"),
    [
        ("U4", 3, r"scales \[12, 3\] of 12 x 256 codes of 4 bits"),
        ("U4", 16, r"scales \[12, 16\] of 12 x 256 codes of 4 bits"),
        ("U4", 0, r"scales \[12, 0\] of torch.float32 beside weights"),
        ("E2M1", 4, r"scales \[12, 4\] of 12 x 256 codes of 4 bits"),
        ("E2M1", 1, r"scales \[12, 1\] of 12 x 256 codes of 4 bits"),
    ],
)
def test_groups_of_4_bit_codes_that_it_lacks(weight, columns, message):
    a = of(weight, scaled="kBy32")
    scales = torch.ones(12, columns, dtype=a.scales.dtype)
    with pytest.raises(ValueError, match=f"^skinny_gemm: {message}"):
        SKINNY_GEMM.bind(a._replace(scales=scales, zeros=None))


def test_codes_of_4_bits_beside_codes_of_x():
    a = fine()
    x, x_scales = codes(4, 208)[:, :208], torch.ones(4, 1)
    weight = torch.zeros(12, 128, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^skinny_gemm: codes of 4 bits beside x of .*e4m3fn"):
        SKINNY_GEMM.bind(a._replace(x=x, x_scales=x_scales, weight=weight))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.int8, CODE, "codes of torch.int8 in x beside weights of torch.float8_e4m3fn"),
        (CODE, torch.int8, "codes of torch.float8_e4m3fn in x beside weights of torch.int8"),
        (torch.uint8, torch.int8, "codes of torch.uint8 in x beside weights of torch.int8"),
        (torch.int8, torch.bfloat16, r"codes in \['x'\] and scales of \['x'\]"),
        (torch.int8, torch.uint8, "codes of 4 bits beside x of torch.int8"),
        (torch.uint8, torch.uint8, "codes of 4 bits beside x of torch.uint8"),
    ],
)
def test_codes_of_another_format_in_x(x, weight, message):
    inputs = 128
    size = (8, inputs // 2 if weight == torch.uint8 else inputs)
    a = eight("E4M3")._replace(
        x=torch.zeros(4, inputs).to(x),
        weight=torch.zeros(size).to(weight),
        out=torch.empty(4, 8, dtype=torch.bfloat16),
        scales=None if weight == torch.bfloat16 else torch.ones(8, 1),
        x_scales=torch.ones(4, 1),
        bias=None,
    )
    with pytest.raises(ValueError, match=f"^skinny_gemm: {message}"):
        SKINNY_GEMM.bind(a)


@pytest.mark.parametrize("shape", [(3, 2), (4, 1), (4,)])
def test_scales_of_x_that_do_not_fit(shape):
    a = eight("E4M3", "kByBlock")
    want = r"want \[4, 2\] of torch.float32"
    with pytest.raises(ValueError, match=rf"^skinny_gemm: x_scales .*; {want}"):
        SKINNY_GEMM.bind(a._replace(x_scales=torch.ones(shape)))
