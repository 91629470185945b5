// out[r, i] = g * sigmoid(alpha * g) * (u + 1), where g = min(x[r, i], limit) and u = x[r, d + i]
// clamped to [-limit, limit]      x: [rows, 2d], out: [rows, d], rows may be strided
// The activation of gpt-oss. Any number of rows, any d, any alignment. Work split: see pieces.cuh.
// Compile-time parameters (jit_kernels/ops/activation/spec.py): SCALAR_T.
#include "activation/pieces.cuh"
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

struct ClampedSwiglu {
  float alpha, limit;

  // Comparisons, not fminf and fmaxf, which would turn a NaN into the limit.
  KILN_FN float of(float gate, float up) const {
    const float g = gate > limit ? limit : gate;
    const float low = up < -limit ? -limit : up, u = low > limit ? limit : low;
    const float act = kiln::mul_rn(g, kiln::sigmoid(kiln::mul_rn(alpha, g)));
    return kiln::mul_rn(act, kiln::add_rn(u, 1.0f));
  }
  KILN_FN float element(const SCALAR_T& gate, const SCALAR_T& up) const {
    return of(kiln::to_float(gate), kiln::to_float(up));
  }
  template <int N>
  KILN_FN void words(const uint32_t (&gate)[N], const uint32_t (&up)[N], uint32_t (&y)[N]) const {
    using Word = kiln::Word<SCALAR_T>;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      float g[Word::kSize], u[Word::kSize];
      Word::unpack(gate[i], g);
      Word::unpack(up[i], u);
#pragma unroll
      for (int k = 0; k < Word::kSize; ++k) g[k] = of(g[k], u[k]);
      y[i] = Word::packed(g);
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
clamped_swiglu(SCALAR_T* out, const SCALAR_T* x, int64_t rows, int64_t d, int64_t out_stride,
               int64_t x_stride, float alpha, float limit) {
  kiln::pdl_wait_then_trigger();
  kiln::gate_rows(ClampedSwiglu{alpha, limit}, out, x, rows, d, out_stride, x_stride);
}
