// Warp reductions, in one instruction on GPUs that have it.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
// The largest x of the 32 lanes, all of which take part.
KILN_FN uint32_t warp_largest(uint32_t x) {
#if defined(KILN_ON_GPU) && __CUDA_ARCH__ >= 800
  uint32_t y;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
#else
#pragma unroll
  for (int m = 16; m; m >>= 1) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, x, m);
    x = other > x ? other : x;
  }
  return x;
#endif
}
// The sum of x over the 32 lanes, all of which take part.
KILN_FN int warp_total(int x) {
#if defined(KILN_ON_GPU) && __CUDA_ARCH__ >= 800
  int y;
  asm volatile("redux.sync.add.s32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
  return y;
#else
#pragma unroll
  for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
#endif
}
}  // namespace kiln
