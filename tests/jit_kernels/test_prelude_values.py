"""The host bodies of kernel_sources/include/kiln compute the documented values."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

HEADERS = ("math/exact", "ptx/fp8", "ptx/memory", "math/reduce", "rows/vec")
INCLUDES = "".join(f'#include "kiln/{name}.cuh"\n' for name in HEADERS)


def launch(body, parameters, *values, block=32, checked=False):
    """Run ``extern "C" __global__ void k(parameters) { body }`` in one block."""
    text = f'{INCLUDES}extern "C" __global__ void k({parameters}) {{ {body} }}'
    kinds = ["pointer" if isinstance(value, torch.Tensor) else "int32" for value in values]
    unit = Unit("test.cu", text, include_closure(text))
    kernel = host.build(unit, "k", kinds, name="k", checked=checked, env=settings())
    world = World(checked=checked)
    world.enqueue(0, kernel, LaunchGeometry((1, 1, 1), (block, 1, 1)), values)
    world.run()


def convert(x, to, expression, source="float", target="uint32_t"):
    """Return ``expression`` (of x[i]) for every element of ``x``, as dtype ``to``."""
    out = torch.empty(x.shape, dtype=to)
    body = f"for (int i = threadIdx.x; i < n; i += 32) {{ {expression} }}"
    launch(body, f"const {source}* x, {target}* y, int n", x.contiguous(), out, x.numel())
    return out


def floats(bits):
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def around(values):
    """Values, the middles between neighbours, one ulp beside each, and both signs."""
    values = values.double().unique()
    values = torch.cat([values, (values[1:] + values[:-1]) / 2]).float()
    up, down = (torch.nextafter(values, torch.tensor(one)) for one in (torch.inf, -torch.inf))
    return torch.cat([values, up, down, -values, -up, -down])


def samples():
    """Random bits: every exponent, subnormals, infinities and NaN of both signs among them."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator)
    special = [0, 1, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F7FFFFF, 0x00800000]
    return torch.cat([floats(bits.tolist()), floats(special), -floats(special)])


def all_halves(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def same(a, b):
    """Equal bits, or NaN on both sides."""
    nan = torch.isnan(a.float()) & torch.isnan(b.float())
    return bool(((a == b) & (torch.signbit(a) == torch.signbit(b)) | nan).all())


NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("name", NAMES)
def test_every_16_bit_float_widens_exactly(name):
    x = all_halves(NAMES[name])
    y = convert(x, torch.float32, "y[i] = kiln::to_float(x[i]);", f"kiln::{name}", "float")
    assert same(y, x.float())


@pytest.mark.parametrize("name", NAMES)
def test_floats_are_rounded_to_16_bits_as_torch_rounds_them(name):
    dtype = NAMES[name]
    finite = all_halves(dtype).float()
    x = torch.cat([around(finite[finite.isfinite() & (finite >= 0)]), samples()])
    y = convert(x, dtype, "kiln::from_float(x[i], y[i]);", target=f"kiln::{name}")
    assert same(y, x.to(dtype))
    assert (y.view(torch.int16)[x.isnan()] == 0x7FFF).all()


def e4m3_values():
    """The 127 values from 0 to 448, from the definition."""
    codes = range(127)
    return torch.tensor([
        (code & 7) * 2.0**-9 if code < 8 else (8 + (code & 7)) * 2.0 ** ((code >> 3) - 10)
        for code in codes
    ], dtype=torch.float64)  # fmt: skip


def e4m3_reference(x):
    """The nearest code, ties to the even one, beyond 448 that of 448; NaN is 0x7f."""
    values, a = e4m3_values(), x.double().abs().clamp(max=448)
    above = torch.searchsorted(values, a.nan_to_num(0.0)).clamp(max=126)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - a, a - values[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code |= torch.signbit(x).long() << 7
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def test_every_e4m3_widens_exactly():
    x = torch.arange(256).to(torch.uint8)
    y = convert(x, torch.float32, "y[i] = kiln::to_float(x[i]);", "kiln::e4m3", "float")
    assert same(y, x.view(torch.float8_e4m3fn).float())
    assert torch.equal(y[:127].double(), e4m3_values())
    assert y[[127, 255]].isnan().all()


def e4m3_inputs():
    half = all_halves(torch.float16).float()
    return torch.cat([around(e4m3_values()), half, all_halves(torch.bfloat16).float(), samples()])


def test_floats_are_rounded_to_e4m3_and_saturate():
    x = e4m3_inputs()
    y = convert(x, torch.uint8, "kiln::from_float(x[i], y[i]);", target="kiln::e4m3")
    assert torch.equal(y, e4m3_reference(x))
    representable = x.abs() <= 448
    torchs = x[representable].to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(y[representable], torchs)


def test_four_floats_are_packed_as_one_by_one():
    x = e4m3_inputs()
    x = x[: x.numel() // 4 * 4]
    body = "y[i] = kiln::pack_e4m3(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);"
    y = torch.empty(x.numel() // 4, dtype=torch.int32)
    loop = f"for (int i = threadIdx.x; i < n; i += 32) {{ {body} }}"
    launch(loop, "const float* x, uint32_t* y, int n", x, y, y.numel())
    assert torch.equal(y.view(torch.uint8), e4m3_reference(x))


@pytest.mark.parametrize("name", NAMES)
def test_four_e4m3_become_pairs_exactly(name):
    dtype = NAMES[name]
    lo, hi = torch.arange(256), torch.arange(256)
    pairs = (lo[:, None] | hi[None, :] << 8).flatten()
    x = (pairs | (pairs.flip(0) << 16)).to(torch.int32)
    y = torch.empty(x.numel(), 2, dtype=torch.int32)
    body = f"kiln::unpack_e4m3<kiln::{name}>(x[i], y[2 * i], y[2 * i + 1]);"
    loop = f"for (int i = threadIdx.x; i < n; i += 32) {{ {body} }}"
    launch(loop, "const uint32_t* x, uint32_t* y, int n", x, y, x.numel())
    got, want = y.view(dtype).flatten(), x.view(torch.float8_e4m3fn).to(dtype)
    assert same(got, want)
    assert (got.view(torch.int16)[want.isnan()] == 0x7FFF).all()


def test_the_bytes_in_the_middle_change_places():
    x = torch.randint(-(2**31), 2**31, (300,), dtype=torch.int64).to(torch.int32)
    y = torch.empty_like(x)
    loop = "for (int i = threadIdx.x; i < n; i += 32) y[i] = kiln::swap_middle_bytes(x[i]);"
    launch(loop, "const uint32_t* x, uint32_t* y, int n", x, y, x.numel())
    assert torch.equal(
        y.view(torch.uint8).view(-1, 4), x.view(torch.uint8).view(-1, 4)[:, [0, 2, 1, 3]]
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_pack_holds_its_first_value_in_the_lower_half(name):
    x = samples()[:1000]
    y = convert(x, torch.int32, f"y[i] = kiln::pack<kiln::{name}>(x[i], -x[i]);")
    halves = y.view(NAMES[name]).view(-1, 2)
    assert same(halves[:, 0].contiguous(), x.to(NAMES[name]))
    assert same(halves[:, 1].contiguous(), (-x).to(NAMES[name]))


def test_round_to_is_a_store_and_a_load():
    x = samples()
    y = convert(x, torch.float32, "y[i] = kiln::round_to<kiln::bf16>(x[i]);", target="float")
    assert same(y, x.bfloat16().float())


# ---- arithmetic ------------------------------------------------------------------------------


def pairs():
    x = samples()[:20_000]
    return torch.stack([x, x.roll(1), x.roll(2)]).contiguous()


OPERATIONS = {
    "add_rn": lambda a, b, c: a.double() + b.double(),  # exact, or far from any tie
    "sub_rn": lambda a, b, c: a.double() - b.double(),
    "mul_rn": lambda a, b, c: a.double() * b.double(),
    "div_rn": lambda a, b, c: a.double() / b.double(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_two_operand_arithmetic_is_rounded_once(name):
    # float64 has more than twice float32's bits, so that rounding twice is rounding once.
    x = pairs()
    y = torch.empty(x.shape[1])
    body = f"for (int i = threadIdx.x; i < n; i += 32) y[i] = kiln::{name}(x[i], x[n + i]);"
    launch(body, "const float* x, float* y, int n", x, y, x.shape[1])
    assert same(y, OPERATIONS[name](*x).float())


@pytest.mark.parametrize("name", ["sqrt_rn", "rcp_rn"])
def test_one_operand_arithmetic_is_rounded_once(name):
    x = samples()
    y = convert(x, torch.float32, f"y[i] = kiln::{name}(x[i]);", target="float")
    exact = {"sqrt_rn": torch.Tensor.sqrt, "rcp_rn": torch.Tensor.reciprocal}[name]
    assert same(y, exact(x.double()).float())


def test_a_fused_multiply_add_is_rounded_once():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, 3000, generator=generator)
    x[2, ::2] = -(x[0] * x[1])[::2]  # cancellation: what is left is the product's rounding error
    y = torch.empty(3000)
    body = """for (int i = threadIdx.x; i < n; i += 32)
      y[i] = kiln::fma_rn(x[i], x[n + i], x[2 * n + i]);"""
    launch(body, "const float* x, float* y, int n", x, y, 3000)
    exact = [
        Fraction(a) * Fraction(b) + Fraction(c)
        for a, b, c in zip(*(row.tolist() for row in x), strict=True)
    ]
    up, down = (torch.nextafter(y, torch.tensor(one)).tolist() for one in (torch.inf, -torch.inf))
    for value, got, above, below in zip(exact, y.tolist(), up, down, strict=True):
        off = abs(Fraction(got) - value)
        assert off <= abs(Fraction(above) - value)
        assert off <= abs(Fraction(below) - value)
    assert y[::2].ne(0).any()


def test_the_nearest_integer_takes_ties_to_even_and_saturates():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3e9, -3e9, torch.inf, torch.nan, 8388609.0])
    y = convert(x, torch.int32, "y[i] = kiln::to_int_rn(x[i]);", target="int32_t")
    most, least = 2**31 - 1, -(2**31)
    assert y.tolist() == [0, 2, 2, 0, -2, -2, most, least, most, 0, 8388609]


def test_exact_powers_of_two_are_within_their_bound():
    x = torch.cat([torch.linspace(-126, 1, 100_001), torch.arange(-126.0, 2)])
    y = convert(x, torch.float32, "y[i] = kiln::exp2_exact(x[i]);", target="float")
    want = torch.exp2(x.double())
    assert ((y.double() - want).abs() / want).max() < 8e-8
    assert torch.equal(y[-128:].double(), want[-128:])
    low = convert(floats([0xFF800000, 0xC7000000]), torch.float32,
                  "y[i] = kiln::exp2_exact(x[i]);", target="float")  # fmt: skip
    assert low.tolist() == [2.0**-126] * 2


@pytest.mark.parametrize(("name", "inverse"), [("exp2_fast", torch.exp2), ("log2_fast", None)])
def test_fast_functions_are_close(name, inverse):
    x = torch.linspace(-20, 20, 4001) if inverse else torch.logspace(-20, 20, 4001, base=2.0)
    y = convert(x, torch.float32, f"y[i] = kiln::{name}(x[i]);", target="float")
    want = torch.exp2(x.double()) if inverse else torch.log2(x.double())
    assert torch.allclose(y.double(), want, rtol=2**-21, atol=2**-21)


def test_the_larger_of_two_keeps_a_nan_and_minus_infinity_is_below_all():
    x = torch.tensor([1.0, torch.nan, -torch.inf, torch.nan, 3.0])
    body = "y[i] = kiln::max_nan(x[i], x[(i + 1) % 5]);"
    y = convert(x, torch.float32, body, target="float")
    assert y[:4].isnan().tolist() == [True, True, True, True]
    assert y[4] == 3
    low = convert(x, torch.float32, "y[i] = kiln::minus_infinity();", target="float")
    assert low.eq(-torch.inf).all()


# ---- reductions and vectors ------------------------------------------------------------------

REDUCE = """
__shared__ float partial[32];
const float v = x[threadIdx.x];
y[threadIdx.x] = kiln::block_sum(v, partial);
y[n + threadIdx.x] = kiln::block_max(v, partial);
y[2 * n + threadIdx.x] = kiln::warp_sum(v);
y[3 * n + threadIdx.x] = kiln::warp_max(v);
y[4 * n + threadIdx.x] = kiln::quad_sum(v);
y[5 * n + threadIdx.x] = kiln::quad_max(v);
"""


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("block", [32, 96, 1024])
def test_reductions_give_every_thread_the_whole(block, checked):
    x = torch.randint(-1000, 1000, (block,)).float() - 2000  # sums are exact in any order
    y = torch.empty(6, block)
    parameters = "const float* x, float* y, int n"
    launch(REDUCE, parameters, x, y, block, block=block, checked=checked)
    warps, quads = x.view(-1, 32), x.view(-1, 4)
    want = [
        x.sum().expand(block),
        x.max().expand(block),
        warps.sum(1, keepdim=True).expand_as(warps).flatten(),
        warps.max(1, keepdim=True).values.expand_as(warps).flatten(),
        quads.sum(1, keepdim=True).expand_as(quads).flatten(),
        quads.max(1, keepdim=True).values.expand_as(quads).flatten(),
    ]
    assert torch.equal(y, torch.stack(want))


def test_vectors_of_every_size_move_whole():
    x, y = torch.arange(64, dtype=torch.int16), torch.zeros(3, 64, dtype=torch.int16)
    body = """
    kiln::Vec<uint16_t>::load(x + 8 * threadIdx.x).store(y + 8 * threadIdx.x);
    kiln::Vec<uint16_t, 4>::load(x + 4 * threadIdx.x).store(y + 64 + 4 * threadIdx.x);
    kiln::Vec<uint16_t, 2>::load(x + 2 * threadIdx.x).store(y + 128 + 2 * threadIdx.x);
    static_assert(kiln::Vec<uint16_t>::kSize == 8 && sizeof(kiln::Vec<float, 2>) == 8);
    """
    launch(f"if (threadIdx.x < 8) {{ {body} }}", "const uint16_t* x, uint16_t* y", x, y)
    assert torch.equal(y[0], x)
    assert torch.equal(y[1, :32], x[:32])
    assert torch.equal(y[2, :16], x[:16])
    assert y[1, 32:].eq(0).all()
