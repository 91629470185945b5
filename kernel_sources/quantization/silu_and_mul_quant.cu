// out[r, :] = quantize(silu(x[r, :d]) * x[r, d:]), with its scales; the same bits as unfused
// x: [rows, 2d], out: [rows, d], any row stride; scales as in quantize.cu. One team of threads per
// row, which is read once.
// Compile-time parameters (jit_kernels/ops/quantization/spec.py): SCALAR_T, QUANT_T.
#include "quantization/gated_rows.cuh"
#include "kiln/ptx/launch.cuh"
#include "quantization/quantize.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#define QUANT_T kiln::e4m3
#endif

extern "C" __global__ void __maxnreg__(40)
silu_and_mul_quant(QUANT_T* out, float* scales, const SCALAR_T* x, const float* scale,
                   int64_t rows, int64_t d, int64_t out_stride, int64_t scale_stride,
                   int64_t group_stride, int64_t x_stride, int32_t group) {
  kiln::pdl_wait_then_trigger();
  __shared__ kiln::Partial<uint32_t> largest;
  const kiln::GatedRows<SCALAR_T, kiln::silu> source{x, x_stride, d};
  const kiln::QuantizeRows<SCALAR_T, QUANT_T> sink{
      reinterpret_cast<uint8_t*>(out), out_stride, scales, scale_stride, group_stride, d,
      group != 0, scale != nullptr, scale ? *scale : 0.0f, largest};
  kiln::run_rows<SCALAR_T>(source, sink, rows, d);
}
