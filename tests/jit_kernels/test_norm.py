"""The norm kernels: fused against separate, when they round, and the summation order of a row."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kiln.jit_kernels.declare.settings import settings as environment
from kiln.jit_kernels.declare.spec import Gpu
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm, rms_norm
from kiln.jit_kernels.ops.norm.spec import SPECS
from kiln.jit_kernels.ops.shared.row_geometry import row_geometry, team_size
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host, nvrtc
from kiln.jit_kernels.toolchains.template import Unit, include_closure

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def on_host(name, *arguments):
    spec = find_spec(name)
    host.run(spec, spec.arguments(arguments), env=environment())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.integers(1, 5),
    st.one_of(st.integers(1, 700), st.sampled_from([896, 2048, 4096])),
    st.sampled_from([0, 3, 8]),
    st.sampled_from([(0.0, False), (0.0, True), (1.0, False), (0.5, True)]),
    st.integers(0, 2**31),
)
def test_fused_is_add_then_norm_bit_for_bit(dtype, rows, d, gap, rounding, seed):
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(rows, d + gap, generator=generator).to(dtype)[:, :d] for _ in "xr")
    weight = torch.randn(d, generator=generator).to(dtype)
    for run, add in ((on_host, True), (None, False)):
        total = x + residual
        if add:
            want = torch.empty_like(total)
            run("rms_norm", want, total, weight, 1e-5, *rounding)
            got, sums = x.clone(), residual.clone()
            run("fused_add_rms_norm", got, sums, weight, 1e-5, *rounding)
        else:
            want = rms_norm(total, weight, 1e-5, None, *rounding)
            got, sums = x.clone(), residual.clone()
            fused_add_rms_norm(got, sums, weight, 1e-5, *rounding)
        assert torch.equal(sums, total)
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_aligned_or_not_alone_or_in_a_batch(dtype):
    x, weight = torch.randn(40, 4096).to(dtype), torch.randn(4096).to(dtype)
    want = torch.empty_like(x)
    on_host("rms_norm", want, x, weight, 1e-6, 0.0, False)
    wide = torch.zeros(40, 4099, dtype=dtype)[:, 1:4097]
    wide.copy_(x)
    for rows in (slice(0, 40), slice(7, 8), slice(11, 13)):
        for source in (x, wide):
            got = torch.empty_like(x[rows])
            on_host("rms_norm", got, source[rows], weight, 1e-6, 0.0, False)
            assert torch.equal(got, want[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("family", "kind", "rounding"),
    [
        ("llama", "LlamaRMSNorm", {}),
        ("olmo2", "Olmo2RMSNorm", {"round_once": True}),
        ("gemma3", "Gemma3RMSNorm", {"weight_offset": 1.0}),
        ("gemma3", "Gemma3RMSNorm", {"weight_offset": 1.0, "round_once": True}),
    ],
)
def test_torchs_operator_gives_the_bits_of_transformers(dtype, family, kind, rounding):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = getattr(module, kind)(768, eps=1e-6).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    x = torch.randn(50, 768).mul_(3).to(dtype)
    with torch.inference_mode():
        want = theirs(x)
    got = rms_norm(x, theirs.weight.detach(), 1e-6, **rounding)
    if dtype == torch.float32:  # the order of two products differs
        torch.testing.assert_close(got, want, rtol=4e-7, atol=0)
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("d", "gap"), [(768, 0), (2050, 1)])  # held in registers, and not
def test_a_kernel_rounds_when_it_should(dtype, d, gap):
    x, weight = torch.randn(20, d + gap).mul_(3).to(dtype)[:, :d], torch.randn(d).to(dtype)
    wide = x.double()
    normal = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    twice, once = normal.to(dtype).double() * weight.double(), normal * weight.double()
    plus = normal * (1 + weight.double())
    for offset, round_once, want in ((0, False, twice), (0, True, once), (1, False, plus)):
        got = torch.empty_like(x)
        on_host("rms_norm", got, x, weight, 1e-6, float(offset), round_once)
        # The error of float32 changes a result only if it is nearly halfway between two numbers.
        assert (got != want.to(dtype)).float().mean() < 0.005
    assert (twice.to(dtype) != once.to(dtype)).float().mean() > 0.1


@pytest.mark.parametrize("scale", [1e-24, 1e-12, 1.0, 1e12, 1e17])
@pytest.mark.parametrize("d", [64, 896, 2048])
def test_rows_of_any_magnitude_are_normalised(scale, d):
    # The mean of squares ranges from 1e-48, which is 0 in float32, to 1e34.
    x, weight = torch.randn(3, d) * scale, torch.ones(d)
    got = torch.empty_like(x)
    on_host("rms_norm", got, x, weight, 1e-30, 0.0, False)
    wide = x.double()
    want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-30)
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=1e-9)


def test_threads_of_a_row_depend_on_its_width_and_type_alone():
    for d in (1, 64, 128, 896, 1024, 2048, 4096, 8192, 16384, 100_000):
        for scalar, itemsize in (("float", 4), ("kiln::fp16", 2), ("kiln::bf16", 2)):
            team = team_size(d, itemsize)
            seen = {
                row_geometry({"scalar_t": scalar}, {"rows": rows, "d": d}, Gpu(count, 1)).block[0]
                for rows in (1, 100, 100_000)
                for count in (1, 4, 132)
            }
            assert seen == {team}
            assert team % 32 == 0 or (team == 16 and itemsize == 2)


def test_every_row_is_somebodys():
    for d in (64, 1024, 4096):
        for rows in (1, 5, 16, 17, 5000):
            geometry = row_geometry({"scalar_t": "float"}, {"rows": rows, "d": d}, Gpu(4, 1))
            assert geometry.grid[0] * geometry.block[1] >= rows
    with pytest.raises(ValueError, match="more than one launch"):
        row_geometry({"scalar_t": "float"}, {"rows": 2**32, "d": 4096}, Gpu(4, 1))


def test_both_kernels_have_three_variants():
    assert all(len(list(spec.variants())) == 3 for spec in SPECS)


@pytest.mark.parametrize(
    ("header", "body", "wanted"),
    [
        ("ptx/fast", "p[0] = reciprocal_fast(p[1]);", "rcp.approx.ftz.f32"),
        ("ptx/fast", "p[0] = rcp_rn_normal(p[1]);", "rcp.approx.ftz.f32"),
        ("ptx/fast", "p[0] = sqrt_rn_normal(p[1]);", "rsqrt.approx.ftz.f32"),
        ("ptx/store", "uint32_t w[4] = {q[0], q[1], 2, 3}; store_words(p, w);", "st.global.v4.u32"),
        ("ptx/store", "uint32_t w[2] = {q[0], 3}; store_words(p, w);", "st.global.v2.u32"),
        ("ptx/store", "uint32_t w[1] = {q[0]}; store_words(p, w);", "st.global.u32"),
    ],
)
def test_device_bodies_compile_to_the_intended_instructions(header, body, wanted):
    text = (
        f'#include "kiln/{header}.cuh"\nextern "C" __global__ void k(float* p, uint32_t* q) '
        f"{{ using namespace kiln; {body} }}"
    )
    unit = Unit("test.cu", text, include_closure(text))
    assert wanted in nvrtc.compile_ptx("k", unit, "sm_90a")
