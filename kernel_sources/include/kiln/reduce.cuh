// Reductions over a block in a fixed order.
#pragma once
#include "kiln/ptx.cuh"

namespace kiln {

// The sum of x over the block, in every thread. blockDim.x is a multiple of 32; the order of the
// additions depends on blockDim.x alone. partial: shared, at least 32 floats.
KILN_FN float block_sum(float x, float* partial) {
  for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  __syncthreads();  // earlier readers of partial are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : 0.0f;
  for (int m = 16; m; m >>= 1) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}

}  // namespace kiln
