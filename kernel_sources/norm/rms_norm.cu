// out[r, i] = x[r, i] / sqrt(mean_i(x[r, i]^2) + eps) * (weight_offset + weight[i])
// x, out: [rows, d], any row stride; weight: [d]. Any d, any alignment. One team of threads per row
// (kiln/rows/rows.cuh). once, set with every offset: the row is not rounded to SCALAR_T before it is
// multiplied by the weight. Compile-time parameters (jit_kernels/ops/norm/spec.py): SCALAR_T.
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/rms.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

extern "C" __global__ void __maxnreg__(32)
rms_norm(SCALAR_T* out, const SCALAR_T* x, const SCALAR_T* weight, int64_t rows, int64_t d,
         int64_t out_stride, int64_t x_stride, float inverse_d, float eps, float weight_offset,
         int once) {
  kiln::pdl_hints_first();
  __shared__ kiln::Partial<float> partial;
  const kiln::RmsRows<SCALAR_T, false> source{
      x, x_stride, nullptr, 0, weight, inverse_d, eps, weight_offset, once != 0, partial};
  kiln::hint_rows<SCALAR_T>(source, rows, d);
  kiln::pdl_wait_then_trigger();
  kiln::run_rows<SCALAR_T>(source, kiln::StoreRows<SCALAR_T>{out, out_stride}, rows, d);
}
