// Reductions over four lanes, a warp or a block, in a fixed order. Every thread gets the result.
// The maxima ignore NaN, as fmaxf does.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

// Over the four lanes that share a row of an mma tile.
KILN_FN float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
KILN_FN float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

// Over the 32 lanes of a warp, all of which take part.
KILN_FN float warp_sum(float x) {
  for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}
KILN_FN float warp_max(float x) {
  for (int m = 16; m; m >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}

// Over the block. blockDim.x: a multiple of 32; it alone fixes the order of the additions. partial:
// shared memory of 32 floats, which may be reused after the block's next barrier.
KILN_FN float block_sum(float x, float* partial) {
  x = warp_sum(x);
  __syncthreads();  // earlier readers of partial are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0.0f);
}
KILN_FN float block_max(float x, float* partial) {
  x = warp_max(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  const bool mine = threadIdx.x % 32 < blockDim.x / 32;
  return warp_max(mine ? partial[threadIdx.x % 32] : minus_infinity());
}

}  // namespace kiln
