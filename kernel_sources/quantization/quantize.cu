// out[r, i] = QUANT_T(x[r, i] / scale), scale = max |x| / (e4m3: 448, int8: 127) of its elements
// x, out: [rows, d], any row stride, any d, any alignment. Scales are shared by a row: scales
// [rows, 1]; or, if group is 128, by 128 elements of a row: scales [rows, d / 128], 128 divides
// d; or by all: scales [1], the given scale, or that of the largest of the maxima [num_maxima],
// a multiple of 4, 16-byte aligned.
// Compile-time parameters (jit_kernels/ops/quantization/spec.py): SCALAR_T, QUANT_T.
#include "quantization/plain.cuh"
#include "kiln/ptx/launch.cuh"
#include "quantization/quantize.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#define QUANT_T kiln::e4m3
#endif

extern "C" __global__ void __maxnreg__(32 + kiln::kExtraRegisters)
quantize(QUANT_T* out, float* scales, const SCALAR_T* x, const float* scale, const float* maxima,
         int64_t rows, int64_t d, int64_t out_stride, int64_t scale_stride, int64_t group_stride,
         int64_t x_stride, int32_t group, int32_t num_maxima) {
  kiln::pdl_wait_then_trigger();
  __shared__ kiln::Partial<uint32_t> partial;
  float given = scale ? *scale : 0.0f;
  if (maxima) {  // few enough for each warp to read all
    uint32_t largest = 0;
#pragma unroll 1
    for (int i = (threadIdx.y * blockDim.x + threadIdx.x) % 32 * 4; i < num_maxima; i += 128) {
      const auto four = kiln::Chunk<float>::load(maxima + i);
      largest = kiln::largest_magnitude(four, largest);
    }
#pragma unroll
    for (int m = 16; m; m >>= 1)
      largest = kiln::Larger::of(largest, __shfl_xor_sync(0xffffffffu, largest, m));
    given = kiln::rare_scale_of<QUANT_T>(largest).scale;
  }
  const kiln::QuantizeRows<SCALAR_T, QUANT_T> sink{
      reinterpret_cast<uint8_t*>(out), out_stride, scales, scale_stride, group_stride, d,
      group != 0, scale || maxima, given, partial};
  kiln::run_rows<SCALAR_T>(kiln::PlainRows<SCALAR_T>{x, x_stride}, sink, rows, d);
}
