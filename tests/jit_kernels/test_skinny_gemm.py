"""The product of a few rows: bits that depend on no other row, and rows of experts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from depth import at_depth
from skinny_experts import (
    BEHIND,
    COUNTS,
    MANY,
    UNWRITTEN,
    every_zero,
    exact,
    exact_products,
    grouped,
    of_experts,
    own_product,
    sorted_ahead,
)
from skinny_products import alone, chained, random_products

from kiln.jit_kernels.declare.parity import error_of, expected
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import DTYPES, HOST_GPU, label
from kiln.jit_kernels.ops.dequantize.reference import codes_of, scale_values
from kiln.jit_kernels.ops.linear.checks import MOST_ROWS
from kiln.jit_kernels.ops.linear.functions import skinny_gemm
from kiln.jit_kernels.ops.linear.spec import SKINNY_GEMM
from kiln.jit_kernels.ops.shared.four_bits import pack_codes
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.template import render

NEEDS = {
    "tiles": "2",
    "experts": "false",
    **at_depth({"scalar_t": "kiln::bf16"}, {}),
}  # for 16 rows
FORMATS = list(SKINNY_GEMM.variants(NEEDS))
FOUR_BITS = ("U4", "E2M1")
OF_FOUR_BITS = [one for one in FORMATS if one["weight"] in FOUR_BITS]
_OF_OUTPUTS = ("weight", "scales", "zeros", "bias")
OF_INT8 = [one for one in FORMATS if one["weight"] == "I8"]
of_every_format, of_four_bits, of_int8 = (
    pytest.mark.parametrize("variant", some, ids=[label(SKINNY_GEMM, one) for one in some])
    for some in (FORMATS, OF_FOUR_BITS, OF_INT8)
)
of_both_tiles = pytest.mark.parametrize("tiles", ["1", "2"])
CODE = torch.float8_e4m3fn


def bits(a, seed=0):
    host.run(SKINNY_GEMM, a, seed=seed, env=settings())
    return a.out.clone(memory_format=torch.contiguous_format).view(torch.int16)


def taken(tensor, index):
    if tensor is not None and tensor.dtype == CODE:
        return tensor.view(torch.uint8)[index].view(CODE)
    return None if tensor is None else tensor[index]


def of_rows(a, rows, tiles):
    """Return the product of some rows, in an order."""
    x, x_scales, out = taken(a.x, rows), taken(a.x_scales, rows), a.out[: len(rows)]
    return a._replace(x=x, x_scales=x_scales, out=torch.empty_like(out), tiles=tiles)


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
    for a, chance in random_products(variant, at_depth(9, 60)):
        wanted = bits(a)
        for low, high, tiles in ((1, 1, 1), (2, 8, 1), (1, 8, 2), (9, 16, 2)):
            rows = chance.sample(range(MOST_ROWS), chance.randint(low, high))
            seed, place = chance.randrange(100), chance.randrange(len(rows))
            own = of_rows(a, rows, tiles)
            assert torch.equal(bits(own, seed), wanted[rows]), (rows, seed)
            got = bits(with_others(own, place, chance), seed)[place]
            assert torch.equal(got, wanted[rows[place]]), (rows, place, seed)


@of_every_format
def test_an_outputs_bits_depend_on_no_other_output(variant):
    """So a rank that has a share of the outputs gets the bits of one that has all."""
    for a, chance in random_products(variant, at_depth(9, 60)):
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


@of_every_format
@pytest.mark.parametrize(("tiles", "experts"), [("1", "false"), ("2", "false"), ("2", "true")])
def test_bits_do_not_depend_on_the_number_of_multiprocessors(variant, tiles, experts):
    """Then blocks compute more outputs, one after the other, or fewer."""
    variant = variant | {"tiles": tiles, "experts": experts}
    sizes = {"rows": 2, "outputs": 397, "inputs": 136, "bias": 1, "zeros": 1}
    sizes |= {"grouped": 5, "experts": 3}
    torch.manual_seed(4)
    a = SKINNY_GEMM.make_arguments(variant, sizes, "cpu")
    wanted, grids = bits(a), set()
    for count in (1, 2, 4, 132):
        gpu = replace(HOST_GPU, num_multiprocessors=count)

        def of_gpu(variant, sizes, _, gpu=gpu):
            geometry = SKINNY_GEMM.geometry(variant, sizes, gpu)
            grids.add(geometry.grid)
            return geometry

        a.out.fill_(torch.nan)
        host.run(replace(SKINNY_GEMM, geometry=of_gpu), a, env=settings())
        assert torch.equal(a.out.view(torch.int16), wanted), count
    goes_on = experts == "true" or variant["weight"] in FOUR_BITS
    assert len(grids) == (4 if goes_on else 1)


@of_every_format
@of_both_tiles
def test_a_row_of_an_expert_has_the_bits_of_its_own_product(variant, tiles):
    """In runs of any length, and rows behind the last end keep what out held."""
    variant = variant | {"tiles": tiles, "experts": "true"}
    torch.manual_seed(int(tiles))
    a = grouped(variant, inputs=1160)
    got, rows = bits(a), sum(COUNTS)
    assert (a.out[rows:] == UNWRITTEN).all()
    assert len(a.out[rows:]) == BEHIND
    # Of each run the first rows, the last one, and those where tiles meet.
    ends = torch.tensor(COUNTS).cumsum(0).tolist()
    telling = {end - back for end in ends for back in (1, 8, 9, 16, 17) if end >= back}
    for row in at_depth(sorted(telling)[::2], range(rows)):
        assert torch.equal(bits(own_product(a, row))[0], got[row]), row


@of_every_format
@of_both_tiles
def test_experts_without_any_rows(variant, tiles):
    a = grouped(variant | {"tiles": tiles, "experts": "true"}, (0, 0, 0))
    bits(a)
    assert (a.out == UNWRITTEN).all()


@pytest.mark.parametrize("counts", [(17,), (0, 0, 40), (1, 0, 0), (9, 8), MANY])
@of_both_tiles
def test_experts_under_the_checker(counts, tiles):
    needs = {"weight": "U4", "scaled": "kBy64", "tiles": tiles, "experts": "true"}
    variant = next(SKINNY_GEMM.variants(needs))
    for seed in range(at_depth(1, 8)):
        a = grouped(variant, counts, inputs=136)
        want = expected(SKINNY_GEMM, a)
        host.run(SKINNY_GEMM, a, seed=seed, checked=True, env=settings())
        assert error_of(SKINNY_GEMM, variant, a, want).holds


@of_both_tiles
def test_experts_with_any_numbers_of_rows(tiles):
    needs = {"weight": "U4", "scaled": "kBy32", "tiles": tiles, "experts": "true"}
    variant, chance = next(SKINNY_GEMM.variants(needs)), random.Random(tiles)
    for _ in range(at_depth(15, 300)):
        most = chance.choice((1, 3, 20, 50))
        counts = [chance.choice((0, chance.randint(0, most))) for _ in range(chance.randint(1, 20))]
        a = grouped(variant, counts, outputs=3, inputs=8)
        want = expected(SKINNY_GEMM, a)
        bits(a)
        assert error_of(SKINNY_GEMM, variant, a, want).holds, counts


@of_four_bits
@of_both_tiles
def test_whole_numbers_are_multiplied_exactly(variant, tiles):
    """With every zero point, and none; of E2M1 also with the smallest scale."""
    for inputs in (8, 520, 2184):
        for a, want in exact_products(variant | {"tiles": tiles}, inputs):
            bits(a)
            assert torch.equal(a.out, want), inputs


@of_int8
@of_both_tiles
def test_whole_numbers_of_8_bits_are_multiplied_exactly(variant, tiles):
    """No sum of a warp reaches 2^24, and scales are powers of two: only results are rounded."""
    variant, dtype = variant | {"tiles": tiles}, DTYPES[variant["scalar_t"]]
    for inputs in (64, 576, 2240):
        torch.manual_seed(inputs)
        sizes = {"rows": 3, "outputs": 34, "inputs": inputs}
        a = SKINNY_GEMM.make_arguments(variant, sizes, "cpu")
        if a.x_scales is None:
            a.x.copy_(torch.randint(-256, 257, a.x.shape))
        for scales in (a.scales, a.x_scales):
            if scales is not None:
                scales.copy_(torch.randint(-10, -5, scales.shape).float().exp2())
        wanted = expected(SKINNY_GEMM, a)["out"]
        bits(a)
        assert torch.equal(a.out, wanted.to(dtype)), inputs


@of_four_bits
def test_every_code_zero_point_and_scale_gives_the_exact_weight(variant):
    """Rows of x that have a single one select the weights, which are rounded once."""
    torch.manual_seed(0)
    size, outputs, dtype = 256, 17, DTYPES[variant["scalar_t"]]  # as many as there are zero points
    groups = {"kByOutput": 1, "kByBlock": 2, "kBy64": 4, "kBy32": 8}[variant["scaled"]]
    codes = torch.stack([torch.arange(size).roll(one) % 16 for one in range(outputs)])
    zeros, scales = None, torch.rand(outputs, groups) + 0.5
    values = codes_of(codes, torch.float32, size)
    if variant["weight"] == "E2M1":
        scales = torch.randint(90, 140, (outputs, groups), dtype=torch.uint8)
        scales[0, :3] = torch.tensor([0, 1, 250])
        values = codes_of(codes, torch.uint8, size)
    else:
        zeros = every_zero((outputs, groups))
        values = values - zeros.repeat_interleave(size // groups, 1)
    a = SKINNY_GEMM.parameters.Arguments(
        out=torch.empty(size, outputs, dtype=dtype),
        x=torch.eye(size, dtype=dtype),
        weight=pack_codes(codes.byte())[None],
        x_scales=None,
        scales=scales[None],
        zeros=None if zeros is None else zeros[None],
        bias=None,
        expert_of=torch.zeros(size, dtype=torch.int32),
        ends=torch.tensor([size], dtype=torch.int32),
        tiles=int(variant["tiles"]),
    )
    bits(a)
    want = values * scale_values(scales).repeat_interleave(size // groups, 1)
    assert torch.equal(a.out, want.T.to(dtype))


def test_scenarios_of_faults_find_nothing_without_one():
    kernel = ["skinny_gemm"]
    for scaled in at_depth(("kNone", "kByBlock"), ("kNone", "kByOutput", "kByBlock", "kBy64")):
        assert alone(render, kernel, 1, needs={"scaled": scaled}) is None
    for weight in ("U4", "E2M1"):
        needs = {"weight": weight, "scaled": "kBy32", "tiles": "1"}
        assert of_experts(render, kernel, 1, needs=needs) is None
        assert exact(render, kernel, 1, needs=needs) is None
    for seed in range(at_depth(2, 20)):
        assert chained(render, kernel, seed) is None
        assert sorted_ahead(render, kernel, seed) is None


def test_the_public_function_takes_experts():
    a = grouped(FORMATS[0] | {"tiles": "1", "experts": "true"}, (3, 0, 9))
    skinny_gemm(a.x, a.weight, a.out, bias=a.bias, of_experts=(a.expert_of, a.ends))
    assert torch.equal(a.out, SKINNY_GEMM.reference(a)["out"])
    assert (a.out[12:] == UNWRITTEN).all()
    assert not (a.out[:12] == UNWRITTEN).all(1).any()
