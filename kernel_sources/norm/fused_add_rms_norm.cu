// residual[r, i] += x[r, i];  x[r, i] = rms_norm(residual[r, :])[i] * weight[i]      both in place
//
// x, residual: [rows, d], rows may be strided; weight: [d]. One block a row; any d, any alignment.
// The sum is rounded to SCALAR_T before the norm reads it: bit for bit what add then norm gives.
// Compile-time parameters (jit_kernels/ops/norm.py): SCALAR_T.
#include "kiln/reduce.cuh"
#include "kiln/vec.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

// Store x + residual in residual; return the square of what was stored.
KILN_FN float add_one(SCALAR_T x, SCALAR_T& residual) {
  kiln::from_float(kiln::to_float(x) + kiln::to_float(residual), residual);
  return kiln::to_float(residual) * kiln::to_float(residual);
}
KILN_FN void scale_one(SCALAR_T x, float scale, SCALAR_T weight, SCALAR_T& y) {
  kiln::from_float(kiln::round_to<SCALAR_T>(kiln::to_float(x) * scale) * kiln::to_float(weight), y);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024)
fused_add_rms_norm(SCALAR_T* x, SCALAR_T* residual, const SCALAR_T* weight, int64_t rows,
                   int64_t d, int64_t x_stride, int64_t residual_stride, float eps) {
  using Vec = kiln::Vec<SCALAR_T>;
  __shared__ float partial[32];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    SCALAR_T* y = x + row * x_stride;
    SCALAR_T* sums = residual + row * residual_stride;
    const int64_t vectors_end = kiln::vector_prefix<SCALAR_T>(d, y, sums, weight);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x * Vec::kSize; i < vectors_end; i += blockDim.x * Vec::kSize) {
      const Vec a = Vec::load(y + i);
      Vec r = Vec::load(sums + i);
#pragma unroll
      for (int k = 0; k < Vec::kSize; ++k) sum += add_one(a.v[k], r.v[k]);
      r.store(sums + i);
    }
    for (int64_t i = vectors_end + threadIdx.x; i < d; i += blockDim.x)
      sum += add_one(y[i], sums[i]);

    // Each thread reads back only what it stored itself, so no barrier is needed between the loops.
    const float scale = 1.0f / sqrtf(kiln::block_sum(sum, partial) / d + eps);
    for (int64_t i = threadIdx.x * Vec::kSize; i < vectors_end; i += blockDim.x * Vec::kSize) {
      const Vec r = Vec::load(sums + i), w = Vec::load(weight + i);
      Vec result;
#pragma unroll
      for (int k = 0; k < Vec::kSize; ++k) scale_one(r.v[k], scale, w.v[k], result.v[k]);
      result.store(y + i);
    }
    for (int64_t i = vectors_end + threadIdx.x; i < d; i += blockDim.x)
      scale_one(sums[i], scale, weight[i], y[i]);
  }
}
