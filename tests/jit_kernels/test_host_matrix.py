"""Asynchronous copies and the matrix operations of a warp: their results, and misuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kiln.jit_kernels.declare.errors import HostFault, LaunchError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

INCLUDES = '#include "kiln/ptx/async.cuh"\n#include "kiln/ptx/mma.cuh"\nusing namespace kiln;\n'
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def launch(source, *values, checked=True, block=32, seed=0, shared=0):
    text = f'{INCLUDES}#line 1 "test.cu"\n{source}'
    kinds = ["pointer" if isinstance(value, torch.Tensor) else "int32" for value in values]
    unit = Unit("test.cu", text, include_closure(text))
    kernel = host.build(unit, "k", kinds, name="k", checked=checked, env=settings())
    world = World(checked=checked, seed=seed)
    world.enqueue(0, kernel, LaunchGeometry((1, 1, 1), (block, 1, 1), shared), values)
    world.run()


def fault(source, *values, **options):
    with pytest.raises(HostFault) as caught:
        launch(source, *values, **options)
    return str(caught.value)


def change(source, old, new):
    assert old in source, "nothing to replace"
    return source.replace(old, new)


# ---- asynchronous copies ---------------------------------------------------------------------

# y = each 128 elements of x in reverse order, with three tiles in flight.
PIPELINE = """
extern "C" __global__ void k(float* x, float* y, int tiles) {
  __shared__ __align__(16) float s[3][128];
  const int i = threadIdx.x * 4;
  for (int t = 0; t < 2; t++) {
    copy_async_16(&s[t][i], x + t * 128 + i, t < tiles);
    copy_commit();
  }
  for (int t = 0; t < tiles; t++) {
    copy_async_16(&s[(t + 2) % 3][i], x + (t + 2) * 128 + i, t + 2 < tiles);
    copy_commit();
    copy_wait<2>();
    __syncwarp();  // all have arrived
    for (int j = 0; j < 4; j++) y[t * 128 + i + j] = s[t % 3][127 - i - j];
    __syncwarp();  // all have read
  }
}
"""


def tensors(tiles):
    return torch.arange(tiles * 128.0), torch.empty(tiles * 128)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("tiles", [1, 2, 3, 8])
def test_a_pipeline_of_copies_delivers_every_tile(tiles, checked):
    for seed in range(4):
        x, y = tensors(tiles)
        launch(PIPELINE, x, y, tiles, checked=checked, seed=seed)
        assert torch.equal(y.view(-1, 128), x.view(-1, 128).flip(1))


def test_a_copy_that_is_not_valid_writes_zeros_and_reads_nothing():
    source = """extern "C" __global__ void k(float* y) {
      __shared__ __align__(16) float s[128];
      copy_async_16(s + threadIdx.x * 4, nullptr, false);
      copy_commit();
      copy_wait<0>();
      y[threadIdx.x] = s[threadIdx.x * 4 + 3];
    }"""
    y = torch.ones(32)
    launch(source, y)
    assert y.eq(0).all()


MISUSE_OF_COPIES = {
    "no wait": ("copy_wait<2>();", "", "read of uninitialised shared memory"),
    "one group short": ("copy_wait<2>", "copy_wait<3>", "read of uninitialised shared memory"),
    "no commit": ("copy_commit();", "", "read of uninitialised shared memory"),
    "no barrier after the wait": ("__syncwarp();  // all have arrived", "", "shared memory"),
    "no barrier before reuse": (
        "__syncwarp();  // all have read", "", "data race on shared memory"
    ),
    "refill one stage early": ("(t + 2) % 3]", "(t + 3) % 3]", "shared memory"),
    "source past the end": ("t + 2 < tiles", "t + 2 <= tiles", "out-of-bounds read of 16 bytes"),
    "past the end of shared memory": ("&s[t][i]", "s[t] + i + 256", "out-of-bounds write"),
    "misaligned source": (
        "x + t * 128 + i", "x + t * 128 + i + 1", "misaligned 16-byte cp.async"
    ),
    "misaligned target": ("&s[t][i]", "&s[t][i] + 2", "misaligned 16-byte cp.async"),
    "to global memory": ("&s[t][i]", "y + i", "cp.async to memory that is not shared"),
    "source overwritten under way": (
        "copy_wait<2>();", "__syncwarp(); x[t * 128 + (i + 4) % 128] = 0; copy_wait<2>();",
        "data race on global memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MISUSE_OF_COPIES)
def test_misuse_of_copies_is_reported(name, seed):
    old, new, category = MISUSE_OF_COPIES[name]
    report = fault(change(PIPELINE, old, new), *tensors(4), 4, seed=seed)
    assert category in report
    assert "test.cu:" in report


def test_without_a_wait_the_plain_form_reads_poison_or_what_came_early():
    found = set()
    for seed in range(4):
        x, y = tensors(4)
        launch(change(PIPELINE, "copy_wait<2>();", ""), x, y, 4, checked=False, seed=seed)
        right = y.view(-1, 128) == x.view(-1, 128).flip(1)
        assert (right | y.view(-1, 128).isnan()).all()
        found.add(bool(right.any()))
    assert found == {False, True}


def test_copies_reach_dynamic_shared_memory_above_48_kib():
    source = """extern "C" __global__ void k(float* x, float* y) {
      float* s = reinterpret_cast<float*>(dynamic_shared() + 100 * 1024);
      copy_async_16(s + threadIdx.x * 4, x + threadIdx.x * 4);
      copy_commit();
      copy_wait<0>();
      __syncwarp();
      y[threadIdx.x] = s[127 - threadIdx.x];
    }"""
    x, y = torch.arange(128.0), torch.empty(32)
    launch(source, x, y, shared=100 * 1024 + 512)
    assert torch.equal(y, x.flip(0)[:32])
    assert "out-of-bounds write" in fault(source, x, y, shared=100 * 1024 + 508)


# ---- matrix operations -----------------------------------------------------------------------

# out = a b + c: a 16 x 16 and b 16 x 8 by rows in shared memory, rows 24 and 8 elements apart.
TILE = """
extern "C" __global__ void k(const TYPE* a, const TYPE* b, const float* c, float* out) {
  __shared__ __align__(16) TYPE s[16][24], t[16][8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) s[i / 16][i % 16] = a[i];
  for (int i = lane; i < 128; i += 32) t[i / 8][i % 8] = b[i];
  __syncwarp();
  uint32_t x[4], y[4];
  ldmatrix_x4(x, &s[lane % 16][lane / 16 * 8]);
  ldmatrix_x4_trans(y, &t[lane % 16][0]);
  float d[4];
  for (int i = 0; i < 4; i++) d[i] = c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2];
  mma_m16n8k16<TYPE>(d, x, y[0], y[1]);
  for (int i = 0; i < 4; i++) out[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}
"""


def operands(dtype, whole=False, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        if whole:
            return torch.randint(-8, 9, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    return draw(16, 16).to(dtype), draw(16, 8).to(dtype), draw(16, 8), torch.empty(16, 8)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_a_tile_loaded_from_shared_memory_is_multiplied(name, checked):
    source = TILE.replace("TYPE", name)
    for seed in range(4):
        a, b, c, out = operands(DTYPES[name], whole=seed % 2 == 0, seed=seed)
        launch(source, a, b, c, out, checked=checked, seed=seed)
        want = a.double() @ b.double() + c.double()
        size = a.double().abs() @ b.double().abs() + c.double().abs()
        assert ((out.double() - want).abs() <= (0 if seed % 2 == 0 else 2**-20) * size).all()


@pytest.mark.parametrize("name", DTYPES)
def test_products_are_exact_and_special_values_pass(name):
    dtype, source = DTYPES[name], TILE.replace("TYPE", name)
    a, b, c, out = operands(dtype)
    a.zero_(), b.zero_(), c.zero_()
    tiny = torch.finfo(dtype).smallest_normal / 2  # subnormal
    a[0, 0], a[1, 1], a[2, 2], a[3, 3], a[4, 4] = tiny, torch.inf, torch.nan, -3, -tiny
    b[0, 0], b[1, 1], b[2, 2], b[3, 3], b[4, 4] = 2, 2, 2, torch.finfo(dtype).max, 1
    launch(source, a, b, c, out)
    want = [2 * tiny, torch.inf, torch.nan, -3 * torch.finfo(dtype).max, -tiny]
    if name == "bf16":
        want[3] = -torch.inf  # beyond float32, too
    got = out.diagonal()[:5]
    assert torch.equal(got.nan_to_num(7.0), torch.tensor(want).nan_to_num(7.0))
    assert got.isnan().tolist() == [False, False, True, False, False]


ELEMENTS = """
extern "C" __global__ void k(const uint16_t* x, const int* order, uint32_t* out) {
  __shared__ __align__(16) uint16_t s[32][8];
  for (int i = 0; i < 8; i++) s[threadIdx.x][i] = x[threadIdx.x * 8 + i];
  __syncwarp();
  uint32_t r[4];
  LOAD(r, s[order[threadIdx.x]]);
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
}
"""


@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix_deals_out_rows_at_any_address(trans):
    x = torch.randint(0, 2**15, (32, 8), dtype=torch.int16)
    order = torch.randperm(32).to(torch.int32)
    out = torch.empty(32, 4, dtype=torch.int32)
    launch(ELEMENTS.replace("LOAD", "ldmatrix_x4_trans" if trans else "ldmatrix_x4"), x, order, out)
    tiles = x[order.long()].view(4, 8, 8)
    tiles = tiles.transpose(1, 2) if trans else tiles
    want = tiles.reshape(4, 32, 2).permute(1, 0, 2)  # lane, register, pair
    assert torch.equal(out.view(torch.int16).view(32, 4, 2), want)


TRANSPOSE = """
extern "C" __global__ void k(const uint32_t* x, uint32_t* out) {
  out[threadIdx.x] = transpose_8x8(x[threadIdx.x]);
}
"""


def test_a_tile_of_pairs_is_transposed():
    x = torch.randint(-(2**15), 2**15, (8, 8), dtype=torch.int16)
    out = torch.empty(8, 8, dtype=torch.int16)
    launch(TRANSPOSE, x, out)
    assert torch.equal(out, x.T)


BARRIER = "__syncwarp();"
MISUSE_OF_MATRICES = {
    "misaligned row": ("&s[lane % 16][lane / 16 * 8]", "&s[lane % 16][lane / 16 * 4]",
                       "misaligned row"),
    "rows of odd distance": ("s[16][24]", "s[16][20]", "misaligned row"),
    "no barrier": (BARRIER, "", "shared memory"),
    "past the end": ("&t[lane % 16][0]", "&t[lane % 16 + 1][0]", "out-of-bounds"),
    "global memory": ("ldmatrix_x4_trans(y, &t[lane % 16][0])",
                      "ldmatrix_x4_trans(y, b + lane % 16 * 8)",
                      "ldmatrix from memory that is not shared"),
    "a tile not wholly written": ("i < 128;", "i < 127;", "read of uninitialised shared memory"),
    "half a warp": ("ldmatrix_x4(x,", "if (lane < 16) ldmatrix_x4(x,", "warp divergence"),
    "one lane left": ("mma_m16n8k16<TYPE>(", "if (lane == 5) return;\n  mma_m16n8k16<TYPE>(",
                      "waits for lane 5, which has exited"),
    "written over while others load": (
        "ldmatrix_x4_trans(y", "s[lane % 16][lane / 16] = a[0];\n  ldmatrix_x4_trans(y",
        "data race on shared memory"),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MISUSE_OF_MATRICES)
def test_misuse_of_matrix_operations_is_reported(name, seed):
    old, new, category = MISUSE_OF_MATRICES[name]
    source = change(TILE, old, new).replace("TYPE", "bf16")
    report = fault(source, *operands(torch.bfloat16), seed=seed)
    assert category in report
    assert "test.cu:" in report


def test_a_matrix_operation_needs_a_whole_warp():
    source = TILE.replace("TYPE", "bf16")
    assert "ldmatrix" in fault(source, *operands(torch.bfloat16), block=16)
    with pytest.raises(HostFault, match="needs a whole warp"):
        launch(change(source, "ldmatrix_x4(x", "if (lane < 32) ldmatrix_x4(x"),
               *operands(torch.bfloat16), block=31)  # fmt: skip


def test_a_spec_must_declare_shared_memory_above_48_kib():
    spec = find_spec("rms_norm")
    variant = next(iter(spec.variants()))
    greedy = replace(
        spec, geometry=lambda variant, sizes, gpu: LaunchGeometry((1, 1, 1), (32, 1, 1), 60 * 1024)
    )
    arguments = spec.make_arguments(variant, spec.sizes[1], "cpu")
    with pytest.raises(LaunchError, match="raise the spec's shared_bytes"):
        host.run(greedy, arguments, env=settings())
    large = replace(greedy, shared_bytes=lambda variant, gpu: 60 * 1024)
    host.run(large, arguments, env=settings())
