// residual[r, i] += x[r, i];  x[r, i] = rms_norm(residual[r, :])[i] * (weight_offset + weight[i])
// x, residual: [rows, d], both in place, any row stride; weight: [d]. Any d, any alignment. One
// team of threads per row (kiln/rows/rows.cuh). The sum is rounded to SCALAR_T before the norm
// reads it: the same bits as add, then norm. once: see rms_norm.cu.
// Compile-time parameters (jit_kernels/ops/norm/spec.py): SCALAR_T.
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/rms.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

extern "C" __global__ void __maxnreg__(40)
fused_add_rms_norm(SCALAR_T* x, SCALAR_T* residual, const SCALAR_T* weight, int64_t rows, int64_t d,
                   int64_t x_stride, int64_t residual_stride, float inverse_d, float eps,
                   float weight_offset, int once) {
  kiln::pdl_hints_first();
  __shared__ kiln::Partial<float> partial;
  const kiln::RmsRows<SCALAR_T, true> source{
      x,         x_stride, residual,      residual_stride, weight,
      inverse_d, eps,      weight_offset, once != 0,       partial};
  kiln::hint_rows<SCALAR_T>(source, rows, d);
  kiln::pdl_wait_then_trigger();
  kiln::run_rows<SCALAR_T>(source, kiln::StoreRows<SCALAR_T>{x, x_stride}, rows, d);
}
