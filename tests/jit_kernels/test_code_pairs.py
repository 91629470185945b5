"""Every code of 4 bits, every zero point and every int8, as the pairs that tensor cores take."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.declare.arch import ALL_ARCHS
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.ops.dequantize.reference import codes_of
from kiln.jit_kernels.ops.shared.four_bits import CHUNK, pack_codes, unpack_codes
from kiln.jit_kernels.toolchains import host, nvrtc
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
RESTORE = {"bf16": 64, "fp16": 512}  # kUnlift, for whole numbers
BODY = """#include "linear/four_bits.cuh"
using namespace kiln;
extern "C" __global__ void k(const uint32_t* words, uint32_t* out, int n, int zero) {
  const uint32_t zeros = FORMAT::zero_pair<T>(zero);
  for (int i = threadIdx.x; i < n; i += 32) {
    const Pairs<4> own = FORMAT::piece<T>(Words{{words[i]}}, 0, zeros);
    for (int p = 0; p < 4; ++p) out[4 * i + p] = own.w[p];
  }
}
"""
# All 16 codes of four words.
OCTETS = """#include "linear/operands.cuh"
using namespace kiln;
extern "C" __global__ void k(const uint32_t* words, uint32_t* out, int n, int) {
  for (int i = 4 * threadIdx.x; i < n; i += 4 * 32) {
    const Words from{{words[i], words[i + 1], words[i + 2], words[i + 3]}};
    for (int piece = 0; piece < 2; ++piece) {
      const Pairs<4> own = FORMAT::piece<T>(from, piece, 0);
      for (int p = 0; p < 4; ++p) out[2 * i + 4 * piece + p] = own.w[p];
    }
  }
}
"""
BODIES = {"U4": BODY, "E2M1": BODY, "I8": OCTETS}


def unit_of(name, kind):
    text = BODIES[kind].replace("FORMAT", kind).replace("<T>", f"<{name}>")
    return Unit("pairs.cu", text, include_closure(text))


def pairs_of(name, kind, packed, zero=0):
    """Return what a word's pairs hold, in the order of the words, [words, 4 or 8]."""
    words, per_word = packed.view(torch.int32).contiguous(), 4 if kind == "I8" else 8
    out = torch.empty(per_word // 2 * words.numel(), dtype=torch.int32)
    kinds = ["pointer", "pointer", "int32", "int32"]
    kernel = host.build(unit_of(name, kind), "k", kinds, name="k", checked=True, env=settings())
    world = World(checked=True)
    geometry = LaunchGeometry((1, 1, 1), (32, 1, 1))
    world.enqueue(0, kernel, geometry, (words, out, words.numel(), zero))
    world.run()
    return out.view(DTYPES[name]).view(-1, per_word)


def every_pair():
    """Packed codes with every code at every place of a word, and what they are in that order."""
    torch.manual_seed(0)
    row = torch.randperm(16).repeat(CHUNK // 16)
    codes = torch.stack([row.roll(places) for places in range(16)])
    packed = pack_codes(codes.to(torch.uint8))
    words = unpack_codes(packed).view(16, 4, 4, 8).transpose(1, 2)  # [.., t, j, 8]
    assert all(len(words[..., place].unique()) == 16 for place in range(8))
    return packed, words.reshape(-1, 8)


@pytest.mark.parametrize("name", DTYPES)
def test_a_whole_number_less_its_zero_point_is_exact(name):
    packed, codes = every_pair()
    for zero in range(17):
        got = pairs_of(name, "U4", packed, zero).float() * RESTORE[name]
        assert torch.equal(got, codes.float() - zero)


@pytest.mark.parametrize("name", DTYPES)
def test_every_e2m1_is_exact(name):
    packed, codes = every_pair()
    got = pairs_of(name, "E2M1", packed).float()
    assert torch.equal(got, codes_of(codes, torch.uint8, 8))
    assert got.unique().tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(got.signbit(), codes > 7)


@pytest.mark.parametrize("name", DTYPES)
def test_every_int8_is_exact(name):
    """At every place of a word, beside every other one."""
    codes = torch.arange(-128, 128).to(torch.int8)
    pairs = torch.stack([codes.repeat(256), codes.repeat_interleave(256)], 1)
    words = torch.cat([pairs, pairs.flip(0)], 1)
    got = pairs_of(name, "I8", words)
    assert torch.equal(got, words.to(DTYPES[name]))
    assert not got[words == 0].signbit().any()


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("name", DTYPES)
def test_it_compiles_for_every_target_with_tensor_cores_for_it(name, kind):
    for arch in ALL_ARCHS:
        if arch != "sm_75":
            assert nvrtc.compile_cubin("k", unit_of(name, kind), arch)
