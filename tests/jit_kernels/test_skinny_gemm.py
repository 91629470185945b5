"""The product of a few rows: bits that depend on no other row, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth
from skinny_products import alone, chained, random_products

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import label
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS
from kiln.jit_kernels.ops.linear.functions import skinny_gemm
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.template import render

NEEDS = {
    "tiles": "2",
    "experts": "false",
    **at_depth({"scalar_t": "kiln::bf16"}, {}),
}  # for 16 rows
FORMATS = list(SKINNY_GEMM.variants(NEEDS))
_OF_OUTPUTS = ("weight", "scales", "zeros", "bias")
of_every_format = pytest.mark.parametrize(
    "variant", FORMATS, ids=[label(SKINNY_GEMM, one) for one in FORMATS]
)
CODE = torch.float8_e4m3fn


def bits(a, seed=0):
    host.run(SKINNY_GEMM, a, seed=seed, env=settings())
    return a.out.clone(memory_format=torch.contiguous_format).view(torch.int16)


def taken(tensor, index):
    if tensor is not None and tensor.dtype == CODE:
        return tensor.view(torch.uint8)[index].view(CODE)
    return None if tensor is None else tensor[index]


def of_rows(a, rows):
    """Return the product of some rows, in an order."""
    x, x_scales = taken(a.x, rows), taken(a.x_scales, rows)
    return a._replace(x=x, x_scales=x_scales, out=torch.empty_like(a.out[: len(rows)]))


def with_others(a, row, chance):
    """Return the product with other values in all rows but one."""
    x, scales = a.x.clone(), None if a.x_scales is None else a.x_scales.clone()
    for other in set(range(len(x))) - {row}:
        if scales is None:
            x[other] = chance.choice((torch.nan, torch.inf, -torch.inf, 6e4))
        else:
            x.view(torch.uint8)[other] = chance.choice((0x7F, 0x7E, 0))  # NaN, 448
            scales[other] = chance.choice((torch.nan, torch.inf, 3e38, 1.0))
    return a._replace(x=x, x_scales=scales)


@of_every_format
def test_a_rows_bits_depend_on_no_other_row(variant):
    for a, chance in random_products(variant, at_depth(12, 60)):
        wanted = bits(a)
        for low, high in ((1, 1), (2, 8), (9, 16)):
            rows = chance.sample(range(MOST_ROWS), chance.randint(low, high))
            own, seed, place = of_rows(a, rows), chance.randrange(100), chance.randrange(len(rows))
            assert torch.equal(bits(own, seed), wanted[rows]), (rows, seed)
            got = bits(with_others(own, place, chance), seed)[place]
            assert torch.equal(got, wanted[rows[place]]), (rows, place, seed)


@of_every_format
def test_an_outputs_bits_depend_on_no_other_output(variant):
    """So a rank that has a share of the outputs gets the bits of one that has all."""
    for a, chance in random_products(variant, at_depth(12, 60)):
        wanted, count = bits(a), a.out.shape[1]
        own = sorted(chance.sample(range(count), chance.randint(1, count)))
        part = {name: taken(getattr(a, name), own) for name in _OF_OUTPUTS}
        assert torch.equal(bits(a._replace(out=a.out[:, : len(own)], **part)), wanted[:, own])


@pytest.mark.parametrize("moved", ["x", "weight"])
def test_bits_do_not_depend_on_alignment(moved):
    a = SKINNY_GEMM.make_arguments(FORMATS[0], {"rows": 3, "outputs": 20, "inputs": 200}, "cpu")
    wanted, held = bits(a), getattr(a, moved)
    elsewhere = torch.empty(held.numel() + 1, dtype=held.dtype)[1:].view_as(held)
    changed = a._replace(**{moved: elsewhere.copy_(held)})
    assert [SKINNY_GEMM.bind(one).derived["aligned"] for one in (a, changed)] == [1, 0]
    assert torch.equal(bits(changed), wanted)


def test_scenarios_of_faults_find_nothing_without_one():
    for scaled in ("kNone", "kByOutput", "kByBlock"):
        assert alone(render, ["skinny_gemm"], 1, scaled=scaled) is None
    assert {chained(render, ["skinny_gemm"], seed) for seed in range(at_depth(2, 20))} == {None}


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
