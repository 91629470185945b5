"""The device bodies of kernel_sources/include/kiln compile to the intended instructions."""

from __future__ import annotations

import re

import pytest

from kiln.jit_kernels.declare.arch import ALL_ARCHS
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.template import Unit, include_closure

HEADERS = (
    *(f"ptx/{name}" for name in ("async", "clock", "cluster", "fp8", "launch", "memory", "mma")),
    *("ptx/pair", "ptx/warp", "ptx/wgmma", "math/exact", "math/reduce", "rows/vec"),
)
INCLUDES = "".join(f'#include "kiln/{name}.cuh"\n' for name in HEADERS)
SIGNATURE = "float* p, uint32_t* q, kiln::bf16* b, kiln::fp16* h, kiln::e4m3* e"


def unit(body, includes=INCLUDES):
    text = f'{includes}extern "C" __global__ void k({SIGNATURE}) {{ using namespace kiln; {body} }}'
    return Unit("test.cu", text, include_closure(text))


def instructions(body, arch="sm_90a"):
    """Return the PTX of the kernel's body, with one space for any white space."""
    return re.sub(r"\s+", " ", nvrtc.compile_ptx("k", unit(body), arch))


SHARED = "__shared__ __align__(16) unsigned char s[1024]; "
TILE = "uint32_t r[4]; float d[4] = {p[0], p[1], p[2], p[3]}; "
KEEP = "for (int i = 0; i < 4; ++i) q[i] = r[i], p[i] = d[i];"
# body -> what its PTX must contain, in this order
PINNED = {
    "copy_async_16": (
        SHARED + "copy_async_16(s, p, q[0] != 0); copy_commit(); copy_wait<2>(); p[0] = s[5];",
        ["cp.async.cg.shared.global.L2::128B [%r", ", 16, %r", "cp.async.commit_group;",
         "cp.async.wait_group 2;", "ld.shared"],
    ),
    "ldmatrix_x4": (
        SHARED + TILE + "ldmatrix_x4(r, s); " + KEEP,
        ["ldmatrix.sync.aligned.m8n8.x4.shared.b16 {"],
    ),
    "ldmatrix_x4_trans": (
        SHARED + TILE + "ldmatrix_x4_trans(r, s); " + KEEP,
        ["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {"],
    ),
    "transpose_8x8": (
        "q[0] = transpose_8x8(q[1]);",
        ["movmatrix.sync.aligned.m8n8.trans.b16 "],
    ),
    "mma of bf16": (
        TILE + "r[0] = r[1] = r[2] = r[3] = q[4]; mma_m16n8k16<bf16>(d, r, q[5], q[6]); " + KEEP,
        ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {"],
    ),
    "mma of fp16": (
        TILE + "r[0] = r[1] = r[2] = r[3] = q[4]; mma_m16n8k16<fp16>(d, r, q[5], q[6]); " + KEEP,
        ["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {"],
    ),
    "pack": (
        "q[0] = pack<bf16>(p[0], p[1]); q[1] = pack<fp16>(p[0], p[1]);",
        ["cvt.rn.bf16x2.f32 ", "cvt.rn.f16x2.f32 "],
    ),
    "acquire and release": (
        "if (load_acquire(q)) store_release(q + 1, 3); "
        "if (load_acquire<Scope::sys>(q + 2)) store_release<Scope::sys>(q + 3, 4);",
        ["ld.acquire.gpu.global.u32", "st.release.gpu.global.u32", "ld.acquire.sys.global.u32",
         "st.release.sys.global.u32"],
    ),
    "relaxed": (
        "store_relaxed(q + 1, load_relaxed(q)); "
        "store_relaxed<Scope::sys>(q + 3, load_relaxed<Scope::sys>(q + 2));",
        ["ld.relaxed.gpu.global.u32", "st.relaxed.gpu.global.u32", "ld.relaxed.sys.global.u32",
         "st.relaxed.sys.global.u32"],
    ),
    "relaxed words": (
        "uint32_t four[4], two[2]; load_words_relaxed(four, q); load_words_relaxed(two, q + 4); "
        "store_words_relaxed(q + 8, {four[0], four[1], two[0], two[1]});",
        ["ld.relaxed.gpu.global.v4.u32", "ld.relaxed.gpu.global.v2.u32",
         "st.relaxed.gpu.global.v4.u32"],
    ),
    "relaxed words of other GPUs": (
        "uint32_t w[4]; load_words_relaxed<Scope::sys>(w, q); "
        "store_words_relaxed<Scope::sys>(q + 4, w);",
        ["ld.relaxed.sys.global.v4.u32", "st.relaxed.sys.global.v4.u32"],
    ),
    "clock": (
        "const uint64_t from = nanoseconds(); q[0] = load_acquire(q + 1); "
        "q[2] = uint32_t(nanoseconds() - from);",
        ["mov.u64 %rd", "%globaltimer;", "ld.acquire", "%globaltimer;"],
    ),
    "arrive": (
        "q[1] = arrive(q, 7); q[3] = arrive<Scope::sys>(q + 2, 7); q[5] = add_acq_rel(q + 4, 2); "
        "q[7] = add_acq_rel<Scope::sys>(q + 6, 2);",
        ["atom.acq_rel.gpu.global.inc.u32", "atom.acq_rel.sys.global.inc.u32",
         "atom.acq_rel.gpu.global.add.u32", "atom.acq_rel.sys.global.add.u32"],
    ),
    "dependent launch": (
        "pdl_wait(); p[0] = 1; pdl_launch_dependents();",
        ["griddepcontrol.wait;", "st.global", "griddepcontrol.launch_dependents;"],
    ),
    "plan": (
        "pdl_reads_plan(); p[0] = load_relaxed(q); prefetch(p + 64); pdl_wait(); p[1] = 1;",
        ["ld.relaxed.gpu.global.u32", "prefetch.global.L2", "griddepcontrol.wait;", "st.global"],
    ),
    "cluster": (
        "__shared__ float s; s = p[0]; cluster_sync(); "
        "p[0] = *map_shared(&s, (cluster_rank() + 1) % cluster_size()); cluster_sync();",
        ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;",
         "%cluster_ctarank;", "%cluster_nctarank;", "mapa.u64", "barrier.cluster.arrive.release"],
    ),
    "panels": (
        "float s[16][4], o[8][4] = {}, w[16][4] = {}; uint32_t r[4] = {q[0], q[1], q[2], q[3]}; "
        "unsigned char* m = panel_begin(dynamic_shared()); publish_to_wgmma(); wgmma_fence(); "
        "wgmma<bf16, false>(s, panel(m), panel(m)); wgmma<fp16, true>(s, panel(m), panel(m)); "
        "wgmma_transposed<bf16>(o, r, panel(m)); wgmma_transposed<fp16>(w, r, panel(m, 4096)); "
        "wgmma_commit(); wgmma_wait<0>(); p[0] = s[3][1] + o[2][2] + w[3][3];",
        ["fence.proxy.async.shared::cta;", "wgmma.fence.sync.aligned;",
         "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16", ", 0, 1, 1, 0, 0;",
         "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", ", 1, 1, 1, 0, 0;",
         "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", ", 1, 1, 1, 1;",
         "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16", ", 1, 1, 1, 1;",
         "wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0;"],
    ),
    "exact arithmetic": (
        "p[0] = add_rn(mul_rn(p[0], p[1]), sub_rn(p[2], p[3])); p[4] = fma_rn(p[5], p[6], p[7]); "
        "p[8] = div_rn(p[8], p[9]); p[9] = sqrt_rn(p[9]); p[10] = rcp_rn(p[10]); "
        "q[0] = to_int_rn(p[10]);",
        ["mul.rn.f32", "sub.rn.f32", "add.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32",
         "rcp.rn.f32", "cvt.rni.s32.f32"],
    ),
    "fast functions": (
        "p[0] = exp2_fast(p[0]); p[1] = log2_fast(p[1]);",
        ["ex2.approx.ftz.f32", "lg2.approx.ftz.f32"],
    ),
    "cluster words": (
        "alignas(16) __shared__ uint32_t s[4]; uint32_t w[4] = {q[0], q[1], q[2], q[3]}; "
        "store_words_cluster(map_shared(s, 1), w); load_words_cluster(w, s); q[4] = w[0] + w[3];",
        ["mapa.u64", "st.relaxed.cluster.v4.u32", "ld.relaxed.cluster.v4.u32"],
    ),
    "conversions": (
        "p[0] = to_float(h[0]) + to_float(b[0]); from_float(p[1], h[1]); from_float(p[1], b[1]);",
        ["cvt.f32.f16", "cvt.rn.f16.f32", "cvt.rn.bf16.f32"],
    ),
    "e4m3": (
        "from_float(p[0], e[0]); q[1] = pack_e4m3(p[1], p[2], p[3], p[4]); "
        "unpack_e4m3<fp16>(q[2], q[3], q[4]);",
        ["cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.satfinite.e4m3x2.f32",
         "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2", "cvt.rn.f16x2.e4m3x2"],
    ),
    "e4m3 to bf16": (
        "unpack_e4m3<bf16>(q[2], q[3], q[4]);",
        ["cvt.rn.f16x2.e4m3x2", *["cvt.f32.f16"] * 2, "cvt.rn.bf16x2.f32"],
    ),
    "arithmetic of pairs": (
        "q[0] = mul_pair<bf16>(q[0], q[1]); q[2] = mul_pair<fp16>(q[2], q[3]); "
        "q[4] = add_pair<bf16>(q[4], q[5]); q[6] = add_pair<fp16>(q[6], q[7]); "
        "q[8] = larger_pair<bf16>(q[8], q[9]); q[10] = larger_pair<fp16>(q[10], q[11]);",
        ["fma.rn.bf16x2", "mul.rn.f16x2", "fma.rn.bf16x2", "add.rn.f16x2",
         "max.NaN.xorsign.abs.bf16x2", "max.NaN.xorsign.abs.f16x2"],
    ),
    "over a warp": (
        "q[0] = warp_largest(q[threadIdx.x]); q[1] = warp_total(q[threadIdx.x]);",
        ["redux.sync.max.u32", "redux.sync.add.s32"],
    ),
    "vectors": (
        "Vec<bf16>::load(b).store(b + 8); Vec<bf16, 4>::load(b + 16).store(b + 20); "
        "Vec<e4m3>::load(e).store(e + 16);",
        ["ld.global.v4.u32", "st.global.v4.u32", "ld.global.v2.u32", "st.global.v2.u32",
         "ld.global.v4.u32", "st.global.v4.u32"],
    ),
    "dynamic shared memory": (
        "dynamic_shared()[threadIdx.x] = 1; __syncthreads(); p[0] = dynamic_shared()[3];",
        [".extern .shared .align 16 .b8", "bar.sync", "ld.shared.u8"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PINNED)
def test_a_primitive_is_its_instruction(name):
    body, expected = PINNED[name]
    text, at = instructions(body), 0
    for one in expected:
        found = text.find(one, at)
        assert found >= 0, f"{one!r} is not in, or not in this order:\n{text}"
        at = found + len(one)


def test_a_barrier_divides_the_writes_of_a_reduction():
    text = instructions("__shared__ float s[32]; p[0] = block_sum(p[threadIdx.x], s);")
    assert re.search(r"bar\.sync.*st\.shared\.f32.*bar\.sync.*ld\.shared\.f32", text)


def test_exact_arithmetic_is_never_contracted():
    exact = instructions("p[0] = add_rn(mul_rn(p[0], p[1]), p[2]);")
    assert "fma" not in exact
    assert "fma" in instructions("p[0] = p[0] * p[1] + p[2];")


def test_exact_arithmetic_keeps_subnormals():
    text = instructions(
        "p[0] = exp2_exact(p[0]) + to_float(e[0]); from_float(p[1], e[1]);", "sm_80"
    )
    assert "ftz" not in text


# The first target that has the instruction; older targets have a body without it.
OLDER = {
    "cp.async": ("sm_80", SHARED + "copy_async_16(s, p); copy_commit(); copy_wait<0>();"),
    "griddepcontrol": ("sm_90a", "pdl_wait(); pdl_launch_dependents(); p[0] = 1;"),
    "e4m3x2.f32": ("sm_89", "from_float(p[0], e[0]); q[1] = pack_e4m3(p[1], p[2], p[3], p[4]);"),
    "f16x2.e4m3x2": ("sm_89", "unpack_e4m3<fp16>(q[0], q[1], q[2]);"),
    "cvt.rn.bf16.f32": ("sm_80", "from_float(p[0], b[0]);"),
}


@pytest.mark.parametrize("arch", ALL_ARCHS)
@pytest.mark.parametrize("name", OLDER)
def test_older_targets_get_a_body_that_they_can_run(name, arch):
    first, body = OLDER[name]
    has = ALL_ARCHS.index(arch) >= ALL_ARCHS.index(first)
    assert (name in instructions(body, arch)) == has


@pytest.mark.parametrize(("dtype", "instruction"),
                         [("fp16", "mul.rn.f16x2"), ("bf16", "fma.rn.bf16x2")])  # fmt: skip
def test_sm_80_widens_e4m3_two_at_a_time(dtype, instruction):
    text = instructions(f"unpack_e4m3<{dtype}>(q[0], q[1], q[2]);", "sm_80")
    assert text.count(instruction) == 2


def test_bytes_change_places_by_one_permutation():
    text = instructions("q[0] = swap_middle_bytes(q[1]);", "sm_80")
    assert text.count("prmt.b32") == 1
    assert f", {0x3120};" in text, "bytes 0, 2, 1 and 3, from the lowest nibble on"


EVERYTHING = " ".join(body for name, (body, _) in PINNED.items() if name in (
    "copy_async_16", "acquire and release", "arrive", "dependent launch", "exact arithmetic",
    "fast functions", "conversions", "vectors"))  # fmt: skip


@pytest.mark.parametrize("arch", ALL_ARCHS)
def test_every_header_compiles_for_every_target(arch):
    assert nvrtc.compile_cubin("k", unit(EVERYTHING), arch).startswith(b"\x7fELF")


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_includes_what_it_needs(name):
    alone = unit("p[0] = 1;", f'#include "kiln/{name}.cuh"\n')
    assert nvrtc.compile_ptx("k", alone, "sm_75")


def test_unused_primitives_leave_nothing_behind():
    text = instructions("p[0] = 1;")
    assert ".shared" not in text
    assert ".func" not in text
