// out[r, i] = x[r, i] / sqrt(mean_i(x[r, i]^2) + eps) * weight[i]
//
// x, out: [rows, d], rows may be strided; weight: [d]. One block a row; any d, any alignment.
// The row is rounded to SCALAR_T before the weight multiplies it, as transformers does.
// Compile-time parameters (jit_kernels/ops/norm.py): SCALAR_T.
#include "kiln/reduce.cuh"
#include "kiln/vec.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

KILN_FN void scale_one(SCALAR_T x, float scale, SCALAR_T weight, SCALAR_T& y) {
  kiln::from_float(kiln::round_to<SCALAR_T>(kiln::to_float(x) * scale) * kiln::to_float(weight), y);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(1024)
rms_norm(SCALAR_T* out, const SCALAR_T* x, const SCALAR_T* weight, int64_t rows, int64_t d,
         int64_t out_stride, int64_t x_stride, float eps) {
  using Vec = kiln::Vec<SCALAR_T>;
  __shared__ float partial[32];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const SCALAR_T* in = x + row * x_stride;
    SCALAR_T* y = out + row * out_stride;
    const int64_t vectors_end = kiln::vector_prefix<SCALAR_T>(d, in, y, weight);
    float sum = 0.0f;
    for (int64_t i = threadIdx.x * Vec::kSize; i < vectors_end; i += blockDim.x * Vec::kSize) {
      const Vec a = Vec::load(in + i);
#pragma unroll
      for (int k = 0; k < Vec::kSize; ++k) sum += kiln::to_float(a.v[k]) * kiln::to_float(a.v[k]);
    }
    for (int64_t i = vectors_end + threadIdx.x; i < d; i += blockDim.x)
      sum += kiln::to_float(in[i]) * kiln::to_float(in[i]);

    const float scale = 1.0f / sqrtf(kiln::block_sum(sum, partial) / d + eps);
    for (int64_t i = threadIdx.x * Vec::kSize; i < vectors_end; i += blockDim.x * Vec::kSize) {
      const Vec a = Vec::load(in + i), w = Vec::load(weight + i);
      Vec result;
#pragma unroll
      for (int k = 0; k < Vec::kSize; ++k) scale_one(a.v[k], scale, w.v[k], result.v[k]);
      result.store(y + i);
    }
    for (int64_t i = vectors_end + threadIdx.x; i < d; i += blockDim.x)
      scale_one(in[i], scale, weight[i], y[i]);
  }
}
