"""wgmma in the host runtime: results, which appear only at the wait, and misuse."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# x [64, 16] times y [128, 16] transposed, and that times z [128, WIDTH], from panels.
SOURCE = """
#include "kiln/ptx/mma.cuh"
#include "kiln/ptx/wgmma.cuh"
using namespace kiln;
extern "C" __global__ void k(T* x, T* y, T* z, float* first, float* second) {
  unsigned char* panels = panel_begin(dynamic_shared());
  unsigned char *a = panels, *b = panels + 8192, *c = b + 16384;
  for (int i = threadIdx.x; i < 64 * 16; i += 128)
    *reinterpret_cast<T*>(a + swizzled(i / 16, i / 8 % 2) + i % 8 * 2) = x[i];
  for (int i = threadIdx.x; i < 128 * 16; i += 128)
    *reinterpret_cast<T*>(b + swizzled(i / 16, i / 8 % 2) + i % 8 * 2) = y[i];
  for (int i = threadIdx.x; i < 128 * WIDTH; i += 128) {
    const int row = i / WIDTH, column = i % WIDTH;
    *reinterpret_cast<T*>(c + column / 64 * 16384 + swizzled(row, column / 8) + i % 8 * 2) = z[i];
  }
  publish_to_wgmma();
  __syncthreads();
  float s[16][4], o[WIDTH / 8][4] = {};
  uint32_t p[8][4];
  wgmma_fence();  // the first
  wgmma<T, false>(s, panel(a), panel(b));
  wgmma_commit();
  wgmma_wait<0>();  // for the first
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int n = 0; n < 16; n++)
    for (int i = 0; i < 4; i++) first[(row + i / 2 * 8) * 128 + n * 8 + column + i % 2] = s[n][i];
  for (int n = 0; n < 8; n++)
    for (int i = 0; i < 4; i++) {
      const float* pair = s[2 * n + i / 2] + i % 2 * 2;
      p[n][i] = pack<T>(pair[0], pair[1]);
    }
  wgmma_fence();  // of registers
  for (int n = 0; n < 8; n++) wgmma_transposed<T>(o, p[n], panel(c + n * 2048, 16384));
  wgmma_commit();
  wgmma_wait<0>();  // for the second
  for (int n = 0; n < WIDTH / 8; n++)
    for (int i = 0; i < 4; i++)
      second[(row + i / 2 * 8) * WIDTH + n * 8 + column + i % 2] = o[n][i];
}
"""


def launch(*changes, name="bf16", width=64, checked=True, seed=0, block=128):
    """Return x, y and z, and the results."""
    source = SOURCE.replace("WIDTH", str(width)).replace("T*", f"{name}*").replace("<T", f"<{name}")
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    unit = Unit("test.cu", source, include_closure(source))
    kernel = host.build(unit, "k", ["pointer"] * 5, name="k", checked=checked, env=settings())
    world = World(checked=checked, seed=seed)
    inputs = [
        torch.randint(-3, 4, sizes).to(DTYPES[name])
        for sizes in ((64, 16), (128, 16), (128, width))
    ]
    results = [torch.full((64, columns), torch.nan) for columns in (128, width)]
    world.enqueue(0, kernel, LaunchGeometry((1, 1, 1), (block, 1, 1), 58 * 1024), inputs + results)
    world.run()
    return *inputs, *results


def holds(x, y, z, first, second):
    wanted = first.to(x.dtype).double() @ z.double()
    return torch.equal(first, x.float() @ y.float().T) and torch.equal(second.double(), wanted)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("name", DTYPES)
def test_four_warps_multiply_panels(name, width, seed):
    assert holds(*launch(name=name, width=width, seed=seed))


FIRST_FENCE, SECOND_FENCE = "wgmma_fence();  // the first", "wgmma_fence();  // of registers"
LAST_WAIT, PUBLISH = "wgmma_wait<0>();  // for the second", "publish_to_wgmma();"
MULTIPLY = "  wgmma<bf16, false>(s"
MISUSE = [
    ("read of uninitialised shared memory", (f"  {PUBLISH}\n  __syncthreads();\n", "")),
    ("written without publish_to_wgmma", (PUBLISH, "")),
    ("written without publish_to_wgmma",
     (PUBLISH, PUBLISH + "if (!threadIdx.x) x[0] = reinterpret_cast<bf16*>(a)[0] = x[1];")),
    ("new registers without a wgmma_fence", (FIRST_FENCE, "")),
    ("new registers without a wgmma_fence", (SECOND_FENCE, "")),
    ("written after the last wgmma_fence",
     (SECOND_FENCE, SECOND_FENCE + "\ns[3][1] += 1; wgmma<bf16, true>(s, panel(a), panel(b));")),
    ("sum of a wgmma was written", (LAST_WAIT, "o[3][2] = 0; wgmma_wait<0>();")),
    ("registers of a wgmma were written", (LAST_WAIT, "p[3][2]++; wgmma_wait<0>();")),
    ("data race on shared memory", (LAST_WAIT, "c[threadIdx.x * 2] = 0; wgmma_wait<0>();")),
    ("not shared|out-of-bounds", ("panel(a), panel(b)", "panel(a), panel(y)")),
    ("10 wgmma by .*, and 9 by thread 0 of the same four warps",
     (MULTIPLY, "  for (int i = -1; i < int(threadIdx.x / 96); i++)\n" + MULTIPLY)),
]  # fmt: skip


@pytest.mark.parametrize(("report", "changes"), [(one[0], one[1:]) for one in MISUSE])
def test_misuse_is_reported(report, changes):
    with pytest.raises(HostFault, match=report):
        launch(*changes)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("wait", ["", "wgmma_wait<1>();"])
@pytest.mark.parametrize("which", ["first", "second"])
def test_a_sum_that_is_not_waited_for_is_not_there(which, wait, seed):
    change = (f"wgmma_wait<0>();  // for the {which}", wait)
    assert not holds(*launch(change, checked=False, seed=seed))


def test_a_sum_that_is_not_committed_is_not_there():
    change = ("wgmma_commit();\n  wgmma_wait<0>();  // for the second", "wgmma_wait<0>();")
    assert not holds(*launch(change, checked=False))


def test_three_warps_are_too_few():
    with pytest.raises(HostFault, match="wgmma needs four whole warps"):
        launch(block=96, checked=False)
