"""The product with quantised weights: exact values, experts, bits of a row, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from depth import at_depth
from quantized_products import bits, chained, of_rows, random_products, sorted_ahead, whole

from kiln.jit_kernels.declare.parity import error_of, expected, poison
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import DTYPES, HOST_GPU, Gpu, label
from kiln.jit_kernels.ops.dequantize.reference import codes_of, scale_values
from kiln.jit_kernels.ops.quantized_linear.cases import BITS
from kiln.jit_kernels.ops.quantized_linear.functions import grouped_quantized_gemm, quantized_gemm
from kiln.jit_kernels.ops.quantized_linear.spec import (
    CLUSTER,
    QUANTIZED_GEMM,
    slices_of,
    tile_rows_for,
)
from kiln.jit_kernels.ops.shared.four_bits import pack_codes
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.cubin import resources_of
from kiln.jit_kernels.toolchains.nvrtc import compile_cubin
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
    every = torch.arange(size, dtype=torch.uint8)
    highest = 2 ** BITS[variant["weight"]] - 1
    codes = torch.stack([every.roll(one) & highest for one in range(outputs)])
    columns = size // int(variant["group"]) if variant["group"] != "0" else 1
    zeros, stored = None, pack_codes(codes)
    if BITS[variant["weight"]] == 8:
        scales = torch.rand(outputs, columns) + 0.5
        if variant["weight"] == "E4M3":
            codes[codes & 0x7F == 0x7F] = 0
        stored = codes.view(torch.int8 if variant["weight"] == "I8" else torch.float8_e4m3fn)
        values = stored.float()
    elif variant["weight"] == "E2M1":
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
            codes=stored,
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
    inputs = -(-inputs // 16) * 16 if BITS[variant["weight"]] == 8 else inputs
    sizes = {"rows": 37, "outputs": outputs, "inputs": inputs, "experts": 0, "more": 1}
    for tile in TILES:
        sizes["by_row"] = tile % 64
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
        if len(a.scales) != count:  # outputs of a part share them with others
            a = a._replace(scales=a.scales.repeat_interleave(128, 0)[:count])
        part = {name: rows_at(getattr(a, name), own) for name in names}
        out = torch.empty(len(a.x), len(own), dtype=a.out.dtype)
        assert torch.equal(bits(a._replace(out=out, **part)), wanted[:, own])


def rows_at(tensor, rows):
    """Return some rows; torch cannot index some dtypes of 8 bits."""
    if tensor.itemsize > 1:
        return tensor[rows]
    return tensor.view(torch.uint8)[rows].view(tensor.dtype)


def grouped(counts, behind, tile, needs=None, outputs=20, inputs=144):
    """Return a product of experts with so many rows, and rows that belong to none."""
    rows = sum(counts) + behind
    sizes = {"rows": rows, "outputs": outputs, "inputs": inputs, "experts": len(counts)}
    variant = next(QUANTIZED_GEMM.variants({"group": "32", **(needs or {})}))
    a = QUANTIZED_GEMM.make_arguments(variant, {**sizes, "zeros": 1}, "cpu")
    a.x[rows - behind :] = torch.nan
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).int()
    return a._replace(ends=ends, tile_rows=tile)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("needs", [{}, {"weight": "E4M3", "group": "128"}])
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
def test_experts_with_no_one_and_many_rows(counts, behind, tile, needs):
    torch.manual_seed(len(counts))
    a = grouped(counts, behind, tile, needs)
    run(a)
    assert holds(a)
    assert a.out[len(a.x) - behind :].isnan().all()


@pytest.mark.parametrize(
    "needs",
    [
        {"weight": "U4"},
        {"weight": "E2M1"},
        {"weight": "E4M3", "group": "128"},
        {"weight": "E4M3", "group": "0"},
        {"weight": "I8", "group": "0"},
    ],
)
def test_an_experts_rows_have_the_bits_of_a_product_with_its_weights(needs):
    torch.manual_seed(5)
    counts = [5, 0, 40, 1]
    a = grouped(counts, 0, 32, needs, inputs=1168)
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


@pytest.mark.parametrize("needs", [{"weight": "E4M3", "group": "128"}, {"weight": "I8"}])
def test_public_functions_take_codes_of_8_bits(needs):
    variant = next(QUANTIZED_GEMM.variants(needs))
    sizes = {"rows": 40, "outputs": 12, "inputs": 144, "experts": 0, "bias": 1, "gap": 3}
    a = QUANTIZED_GEMM.make_arguments(variant, sizes, "cpu")
    quantized_gemm(a.x, a.codes, a.scales, a.out, bias=a.bias)
    columns = a.scales if a.scales.shape[1] == 1 else a.scales.repeat_interleave(128, 1)[:, :144]
    y = a.x.float() @ (a.codes.float() * columns).T + a.bias.float()
    assert torch.equal(a.out, y.to(a.out.dtype))
    a = grouped([3, 0, 9], 2, 32, {"group": "0", **needs})
    grouped_quantized_gemm(a.x, a.codes, a.scales, a.out, a.ends)
    assert torch.equal(a.out[:12], QUANTIZED_GEMM.reference(a)["out"][:12])


SHARED = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90a": 227 * 1024}  # of a block


@pytest.mark.parametrize("weight", ["U4", "E4M3"])
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("arch", SHARED)
def test_the_template_takes_the_shared_memory_of_its_spec(weight, tile, arch):
    variant = {**FORMATS[0], "weight": weight, "group": "128", "tile_rows": str(tile)}
    gpu = Gpu(num_multiprocessors=100, max_shared_bytes=SHARED[arch])
    dynamic = QUANTIZED_GEMM.shared_bytes(variant, gpu)
    own = "kiln::kStages * kiln::kStageBytes + TILE_ROWS * kiln::kPitch * 4"
    unit = render(QUANTIZED_GEMM, variant)
    text = f"{unit.text}\nstatic_assert({own} == {dynamic});\n"
    cubin = compile_cubin("sizes", replace(unit, text=text), arch)
    whole = dynamic + resources_of(cubin)["quantized_gemm"].shared_bytes
    assert whole <= SHARED[arch]
    of_two = 2 * (whole + 1024)  # a block has 1 KiB more
    if arch == "sm_90a" or (arch, weight, tile) == ("sm_80", "E4M3", 32):
        assert of_two <= SHARED[arch] + 1024


def test_products_of_few_rows_fill_a_gpu():
    for outputs, inputs in ((4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096)):
        sizes = {"rows": 64, "outputs": outputs, "inputs": inputs, "experts": 0}
        grid = QUANTIZED_GEMM.geometry({"tile_rows": "64", "weight": "U4"}, sizes, HOST_GPU).grid
        assert grid[0] * grid[1] >= 128
        assert grid[0] % CLUSTER == 0
    # A row's order of sums must not depend on the batch.
    assert [slices_of(outputs, 4096) for outputs in (1024, 4096, 8192, 16384)] == [4, 4, 2, 1]
    assert [slices_of(128, inputs) for inputs in (1016, 1024, 2048)] == [2, 2, 4]
    assert [tile_rows_for(rows, 0) for rows in (1, 32, 33)] == [32, 32, 64]
    assert [tile_rows_for(rows, 8) for rows in (256, 257)] == [32, 64]


def test_scenarios_of_faults_find_nothing_without_one():
    for weight, group in (("U4", "0"), ("U4", "128"), ("E4M3", "128")):
        needs = {"weight": weight, "group": group}
        assert whole(render, ["quantized_gemm"], 1, needs=needs) is None
    for seed in range(at_depth(2, 20)):
        assert chained(render, ["quantized_gemm"], seed) is None
        assert sorted_ahead(render, ["quantized_gemm"], seed) is None
