"""The product with quantised weights: exact values, experts, bits of a row, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from depth import at_depth
from quantized_products import bits, chained, of_rows, random_products, sorted_ahead, whole

from kiln.jit_kernels.declare.parity import error_of, expected, poison
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import DTYPES, HOST_GPU, label
from kiln.jit_kernels.ops.dequantize.reference import codes_of, scale_values
from kiln.jit_kernels.ops.quantized_linear.functions import grouped_quantized_gemm, quantized_gemm
from kiln.jit_kernels.ops.quantized_linear.spec import (
    CLUSTER,
    QUANTIZED_GEMM,
    slices_of,
    tile_rows_for,
)
from kiln.jit_kernels.ops.shared.four_bits import pack_codes
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.template import render

NEEDS = {"tile_rows": "32", **at_depth({"scalar_t": "kiln::bf16"}, {})}
FORMATS = list(QUANTIZED_GEMM.variants(NEEDS))
of_every_format = pytest.mark.parametrize(
    "variant", FORMATS, ids=[label(QUANTIZED_GEMM, one) for one in FORMATS]
)
TILES = (32, 64)


def run(a, seed=0):
    poison(a.out)
    host.run(QUANTIZED_GEMM, a, seed=seed, checked=True, env=settings())


def holds(a):
    variant = QUANTIZED_GEMM.bind(a).variant
    return error_of(QUANTIZED_GEMM, variant, a, expected(QUANTIZED_GEMM, a)).holds


@of_every_format
def test_every_code_zero_point_and_scale_gives_the_exact_weight(variant):
    """Rows of x that have a single one select the weights, which are rounded once."""
    torch.manual_seed(0)
    dtype, size = DTYPES[variant["scalar_t"]], 256
    outputs = 17  # as many as there are zero points
    codes = torch.stack([torch.arange(size).roll(one) % 16 for one in range(outputs)])
    columns = size // int(variant["group"]) if variant["group"] != "0" else 1
    zeros = None
    if variant["weight"] == "E2M1":
        scales = torch.randint(90, 140, (outputs, columns), dtype=torch.uint8)
        scales[0, :3] = torch.tensor([0, 1, 250])
        values = codes_of(codes, torch.uint8, size)
    else:
        scales = torch.rand(outputs, columns) + 0.5
        zeros = torch.arange(outputs, dtype=torch.int16).unsqueeze(1).repeat(1, columns)
        zeros = (zeros + torch.arange(columns)).short() % 17
        values = codes - zeros.repeat_interleave(size // columns, 1)
    want = values * scale_values(scales).repeat_interleave(size // columns, 1)
    for tile in TILES:
        out = torch.empty(size, outputs, dtype=dtype)
        made = QUANTIZED_GEMM.parameters.Arguments(
            out=out,
            x=torch.eye(size, dtype=dtype),
            codes=pack_codes(codes.byte()),
            scales=scales,
            zeros=zeros,
            bias=None,
            ends=None,
            tile_rows=tile,
        )
        run(made)
        assert torch.equal(out, want.T.to(dtype))


@of_every_format
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 8), (7, 120), (129, 24), (130, 392)])
def test_odd_sizes(variant, outputs, inputs):
    sizes = {"rows": 37, "outputs": outputs, "inputs": inputs, "experts": 0}
    for tile in TILES:
        a = QUANTIZED_GEMM.make_arguments(variant, {**sizes, "zeros": 1, "bias": 1}, "cpu")
        a = a._replace(tile_rows=tile)
        run(a)
        assert holds(a)


@of_every_format
def test_a_rows_bits_depend_on_no_other_row(variant):
    """Nor on the rows of a block, nor on how many blocks share a sum."""
    for a, chance in random_products(variant, at_depth(4, 30)):
        wanted, count = bits(a), len(a.x)
        rows = chance.sample(range(count), chance.randint(1, count))
        others = of_rows(a, rows)._replace(tile_rows=chance.choice(TILES))
        for split in (False, True):
            got = bits(others, chance.randrange(100), whole=split)
            assert torch.equal(got, wanted[rows]), (rows, others.tile_rows, split)
        row = chance.randrange(count)
        x = torch.full_like(a.x, chance.choice((torch.nan, torch.inf, 6e4)))
        x[row] = a.x[row]
        assert torch.equal(bits(a._replace(x=x))[row], wanted[row])


@of_every_format
def test_an_outputs_bits_depend_on_no_other_output(variant):
    for a, chance in random_products(variant, at_depth(3, 30)):
        wanted, count = bits(a), a.out.shape[1]
        own = sorted(chance.sample(range(count), chance.randint(1, count)))
        names = [
            name for name in ("codes", "scales", "zeros", "bias") if getattr(a, name) is not None
        ]
        part = {name: getattr(a, name)[own] for name in names}
        out = torch.empty(len(a.x), len(own), dtype=a.out.dtype)
        assert torch.equal(bits(a._replace(out=out, **part)), wanted[:, own])


def grouped(counts, behind, tile, needs=None, outputs=20, inputs=136):
    """Return a product of experts with so many rows, and rows that belong to none."""
    rows = sum(counts) + behind
    sizes = {"rows": rows, "outputs": outputs, "inputs": inputs, "experts": len(counts)}
    variant = next(QUANTIZED_GEMM.variants({"group": "32", **(needs or {})}))
    a = QUANTIZED_GEMM.make_arguments(variant, {**sizes, "zeros": 1}, "cpu")
    a.x[rows - behind :] = torch.nan
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    return a._replace(ends=ends, tile_rows=tile)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    ("counts", "behind"),
    [
        ([0, 0, 0], 3),
        ([1], 0),
        ([0, 1, 0, 64, 0], 2),
        ([33, 0, 65], 0),
        ([0] * 40 + [1, 2] + [0] * 90 + [32, 1] + [0] * 3, 1),
        ([1] * 131, 0),
    ],
)
def test_experts_with_no_one_and_many_rows(counts, behind, tile):
    torch.manual_seed(len(counts))
    a = grouped(counts, behind, tile)
    run(a)
    assert holds(a)
    assert a.out[len(a.x) - behind :].isnan().all()


@pytest.mark.parametrize("needs", [{"weight": "U4"}, {"weight": "E2M1"}])
def test_an_experts_rows_have_the_bits_of_a_product_with_its_weights(needs):
    torch.manual_seed(5)
    counts = [5, 0, 40, 1]
    a = grouped(counts, 0, 32, needs, inputs=1160)
    run(a)
    start = 0
    for expert, count in enumerate(counts):
        rows = slice(start, start + count)
        zeros = None if a.zeros is None else a.zeros[expert]
        own = a._replace(
            x=a.x[rows], codes=a.codes[expert], scales=a.scales[expert], zeros=zeros, ends=None
        )
        own = own._replace(out=torch.empty_like(a.out[rows]))
        if count:
            assert torch.equal(bits(own), a.out[rows].view(torch.int16))
        start += count


def test_public_functions_write_what_the_reference_returns():
    variant = FORMATS[0]
    sizes = {"rows": 40, "outputs": 12, "inputs": 136, "experts": 0, "bias": 1, "zeros": 1}
    a = QUANTIZED_GEMM.make_arguments(variant, sizes, "cpu")
    quantized_gemm(a.x, a.codes, a.scales, a.out, a.zeros, a.bias)
    assert torch.equal(a.out, QUANTIZED_GEMM.reference(a)["out"])
    a = grouped([3, 0, 9], 2, 32)
    a.out.fill_(7)
    grouped_quantized_gemm(a.x, a.codes, a.scales, a.out, a.ends, a.zeros)
    assert torch.equal(a.out, QUANTIZED_GEMM.reference(a)["out"])
    assert (a.out[12:] == 7).all()


def test_products_of_few_rows_fill_a_gpu():
    for outputs, inputs in ((4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096)):
        sizes = {"rows": 64, "outputs": outputs, "inputs": inputs, "experts": 0}
        grid = QUANTIZED_GEMM.geometry({"tile_rows": "64"}, sizes, HOST_GPU).grid
        assert grid[0] * grid[1] >= 128
        assert grid[0] % CLUSTER == 0
    # A row's order of sums must not depend on the batch.
    assert [slices_of(outputs, 4096) for outputs in (1024, 4096, 8192, 16384)] == [4, 4, 2, 1]
    assert [slices_of(128, inputs) for inputs in (1016, 1024, 2048)] == [2, 2, 4]
    assert [tile_rows_for(rows, 0) for rows in (1, 32, 33)] == [32, 32, 64]
    assert [tile_rows_for(rows, 8) for rows in (256, 257)] == [32, 64]


def test_scenarios_of_faults_find_nothing_without_one():
    for group in ("0", "128"):
        assert whole(render, ["quantized_gemm"], 1, needs={"group": group}) is None
    for seed in range(at_depth(2, 20)):
        assert chained(render, ["quantized_gemm"], seed) is None
        assert sorted_ahead(render, ["quantized_gemm"], seed) is None


def plain(**changes):
    """Arguments of the operator that are fine but for the changes."""
    sizes = {"rows": 4, "outputs": 12, "inputs": 200, "experts": 0, "zeros": 1}
    a = QUANTIZED_GEMM.make_arguments(FORMATS[0], sizes, "cpu")
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
        ({"scales": lambda a: a.scales.byte()}, "zero points beside scales of uint8"),
        ({"zeros": lambda a: a.zeros.int()}, "zeros is .* of torch.int32; want .* of torch.int16"),
        ({"bias": lambda a: torch.ones(12)}, r"bias is \[12\] of torch.float32; want \[12\] of"),
        ({"scales": lambda a: a.scales.T.contiguous().T}, "scales is not contiguous"),
        ({"codes": lambda a: unaligned(a.codes)}, "codes does not begin at a multiple of 16"),
    ],
)
def test_it_names_what_it_cannot_multiply(change, message):
    with pytest.raises(ValueError, match=f"^quantized_gemm: {message}"):
        QUANTIZED_GEMM.bind(plain(**change))


def test_experts_have_no_bias_and_an_end_each():
    a = grouped([3, 0, 9], 2, 32)
    with pytest.raises(ValueError, match="a bias beside experts"):
        QUANTIZED_GEMM.bind(a._replace(bias=torch.ones(20).bfloat16()))
    with pytest.raises(ValueError, match=r"ends is \[2\] of torch.int32; want \[3\] of"):
        QUANTIZED_GEMM.bind(a._replace(ends=a.ends[:2]))


def unaligned(tensor):
    return torch.empty(tensor.numel() + 8, dtype=tensor.dtype)[8:].view_as(tensor)
