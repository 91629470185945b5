// out[r, i] = act(x[r, i]) * x[r, d + i]      x: [rows, 2d], out: [rows, d], rows may be strided
//
// Any row count, any d, any alignment: aligned rows move in 16-byte vectors with a scalar tail.
// Compile-time parameters (jit_kernels/ops/activation.py): SCALAR_T, ACTIVATION.
#include "kiln/vec.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#define ACTIVATION silu
#endif

namespace {

// The exact formulas of torch.nn.functional, in float32.
KILN_FN float silu(float x) { return x / (1.0f + expf(-x)); }
KILN_FN float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }
KILN_FN float gelu_tanh(float x) {
  const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

KILN_FN void act_and_mul_one(SCALAR_T gate, SCALAR_T up, SCALAR_T& y) {
  kiln::from_float(ACTIVATION(kiln::to_float(gate)) * kiln::to_float(up), y);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
act_and_mul(SCALAR_T* out, const SCALAR_T* x, int64_t rows, int64_t d, int64_t out_stride,
            int64_t x_stride) {
  using Vec = kiln::Vec<SCALAR_T>;
  const int64_t first = blockIdx.y * int64_t(blockDim.x) + threadIdx.x;
  const int64_t step = int64_t(gridDim.y) * blockDim.x;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const SCALAR_T* gate = x + row * x_stride;
    const SCALAR_T* up = gate + d;
    SCALAR_T* y = out + row * out_stride;
    const int64_t vectors_end = kiln::vector_prefix<SCALAR_T>(d, gate, up, y);
    for (int64_t i = first * Vec::kSize; i < vectors_end; i += step * Vec::kSize) {
      const Vec g = Vec::load(gate + i), u = Vec::load(up + i);
      Vec result;
#pragma unroll
      for (int k = 0; k < Vec::kSize; ++k) act_and_mul_one(g.v[k], u.v[k], result.v[k]);
      result.store(y + i);
    }
    for (int64_t i = vectors_end + first; i < d; i += step) act_and_mul_one(gate[i], up[i], y[i]);
  }
}
