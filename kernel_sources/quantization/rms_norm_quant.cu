// out[r, :] = quantize(rms_norm(x[r, :])), with its scales; the same bits as norm, then quantize
// x, out: [rows, d], any row stride; weight: [d]; scales as in quantize.cu. Half a team of threads
// per row, which is read once. A thread has four chunks, because much of the work for a row takes
// as long for one chunk as for four.
// Compile-time parameters (jit_kernels/ops/quantization/spec.py): SCALAR_T, QUANT_T.
#include "kiln/ptx/launch.cuh"
#include "quantization/quantize.cuh"
#include "kiln/rows/rms.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#define QUANT_T kiln::e4m3
#endif

extern "C" __global__ void __maxnreg__(48 + kiln::kExtraRegisters)
rms_norm_quant(QUANT_T* out, float* scales, const SCALAR_T* x, const SCALAR_T* weight,
               const float* scale, int64_t rows, int64_t d, int64_t out_stride,
               int64_t scale_stride, int64_t group_stride, int64_t x_stride, int32_t group,
               float inverse_d, float eps, float weight_offset, int once) {
  kiln::pdl_hints_first();
  __shared__ kiln::Partial<float> partial;
  __shared__ kiln::Partial<uint32_t> largest;
  const kiln::RmsRows<SCALAR_T, false, 4> source{
      x, x_stride, nullptr, 0, weight, inverse_d, eps, weight_offset, once != 0, partial};
  kiln::hint_rows<SCALAR_T>(source, rows, d);
  kiln::pdl_wait_then_trigger();
  const kiln::QuantizeRows<SCALAR_T, QUANT_T> sink{
      reinterpret_cast<uint8_t*>(out), out_stride, scales, scale_stride, group_stride, d,
      group != 0, scale != nullptr, scale ? *scale : 0.0f, largest};
  kiln::run_rows<SCALAR_T>(source, sink, rows, d);
}
