// out[b] = max |x[r, i]| over all i and the rows r = b, b + num_parts, ...      out: [num_parts]
// x: [rows, d], any row stride, any d, any alignment. A block computes each part; the largest part
// is the tensor's maximum, in any order, and NaN propagates.
// Compile-time parameters (jit_kernels/ops/quantization/spec.py): SCALAR_T.
#include "kiln/ptx/launch.cuh"
#include "quantization/quantize.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

// Maximum over ROWS rows at a time: with many rows, one at a time has too few loads in flight.
template <int ROWS>
KILN_FN uint32_t largest_of(const SCALAR_T* x, int64_t rows, int64_t d, int64_t stride) {
  using Chunk = kiln::Chunk<SCALAR_T>;
  uint32_t largest = 0;
  for (int64_t row = blockIdx.x; row < rows; row += ROWS * gridDim.x) {
    for (int64_t i = kiln::first_chunk<SCALAR_T>(); i < d; i += kiln::team_span<SCALAR_T>()) {
      Chunk some[ROWS]{};
      const SCALAR_T* p = x + row * stride + i;
#pragma unroll
      for (int r = 0; r < ROWS; ++r, p += gridDim.x * stride)
        if (r == 0 || row + r * gridDim.x < rows) some[r] = Chunk::load(p);
#pragma unroll
      for (int r = 0; r < ROWS; ++r) largest = kiln::largest_magnitude(some[r], largest);
    }
  }
  return largest;
}

// Maximum over rows of any width and alignment.
KILN_FN uint32_t largest_of_elements(const SCALAR_T* x, int64_t rows, int64_t d, int64_t stride) {
  uint32_t largest = 0;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x)
    kiln::for_each_element<SCALAR_T>(0, d, [&](int64_t i) {
      largest = kiln::Larger::of(largest, kiln::magnitude(kiln::to_float(x[row * stride + i])));
    });
  return largest;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512)
tensor_amax(float* out, const SCALAR_T* x, int64_t rows, int64_t d, int64_t x_stride) {
  kiln::pdl_wait_then_trigger();
  __shared__ kiln::Partial<uint32_t> partial;
  const uint32_t odd = kiln::misalignment_of(x, x_stride) | uint32_t(d) * sizeof(SCALAR_T);
  uint32_t largest = odd % 16           ? largest_of_elements(x, rows, d, x_stride)
                     : rows > gridDim.x ? largest_of<4>(x, rows, d, x_stride)
                                        : largest_of<1>(x, rows, d, x_stride);
  largest = kiln::team_largest(largest, partial);
  if (threadIdx.x == 0) out[blockIdx.x] = kiln::as_float(largest);
}
