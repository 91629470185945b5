// out[r, i] = act(x[r, i]) * x[r, d + i]      x: [rows, 2d], out: [rows, d], rows may be strided
// Any number of rows, any d, any alignment. Work split: see pieces.cuh.
// Compile-time parameters (jit_kernels/ops/activation/spec.py): SCALAR_T, ACTIVATION.
#include "activation/pieces.cuh"
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#define ACTIVATION silu
#endif

namespace {

struct Gated {
  KILN_FN float element(const SCALAR_T& gate, const SCALAR_T& up) const {
    const float act = kiln::ACTIVATION(kiln::to_float(gate));
    return kiln::mul_rn(act, kiln::to_float(up));
  }
  template <int N>
  KILN_FN void words(const uint32_t (&gate)[N], const uint32_t (&up)[N], uint32_t (&y)[N]) const {
    kiln::act_and_mul<SCALAR_T, kiln::ACTIVATION>(gate, up, y);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
act_and_mul(SCALAR_T* out, const SCALAR_T* x, int64_t rows, int64_t d, int64_t out_stride,
            int64_t x_stride) {
  kiln::pdl_wait_then_trigger();
  kiln::gate_rows(Gated{}, out, x, rows, d, out_stride, x_stride);
}
