// out[m, n] = bias[n] + the sum over k of x[m, k] * weight[n, k], for 1 to 8 * TILES rows of x
//
// x: [rows, inputs] and weight: [outputs, inputs] are SCALAR_T or e4m3; e4m3 values are multiplied
// by scales. SCALED = kByOutput: one scale for each output, and in x one for each row. kByBlock: one
// for each 128 inputs of these, or of 128 outputs (outputs_log2 = 7). scales: [outputs >>
// outputs_log2, scale_columns]. x_scales: [rows, 1 or inputs / 128]. bias: [outputs] or null.
// Strides are counted in elements. Rows of e4m3 begin at multiples of 16 bytes, and have a multiple
// of 64 elements, of 128 if SCALED = kByBlock. Other tensors may have any size and alignment.
// Work split: a block computes 16 outputs. Its 16 warps take turns: each multiplies 128 bytes of
// every row at a time. The sums of the warps are added in a fixed order. The bits of a result
// depend on its row of x, its output's weights, `inputs` and the formats; they do not depend on the
// other rows, on the number of outputs, or on TILES.
// Memory: weights never change, so they are loaded before the kernel ahead has ended. Loads go
// straight into registers; shared memory holds the sums of the warps.
// Compile-time parameters (jit_kernels/ops/linear/spec.py): SCALAR_T, WEIGHT, INPUT, SCALED, TILES.
#include "kiln/math/exact.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/mma.cuh"
#include "linear/operands.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef WEIGHT
#define WEIGHT Plain
#endif
#ifndef INPUT
#define INPUT Plain
#endif
#ifndef SCALED
#define SCALED kNone
#endif
#ifndef TILES
#define TILES 1
#endif

namespace kiln {

enum Scaled { kNone, kByOutput, kByBlock };

constexpr int kWarps = 16, kOutputs = 16, kBlock = 128;
constexpr int kChunk = 4 * WEIGHT::kElements;  // inputs that a warp loads at a time
constexpr int kVectors = WEIGHT::kElements / INPUT::kElements;  // of x, for one of the weights
constexpr bool kCodes = WEIGHT::kElements > 8;
constexpr int kAhead = kCodes && TILES > 1 ? 1 : 2;  // chunks in flight, as registers allow
constexpr int kPitch = kOutputs + 4;  // of sums, so that lanes store in different banks

using T = SCALAR_T;
template <class Format> struct Element { using type = uint8_t; };
template <> struct Element<Plain> { using type = T; };
using Weight = Element<WEIGHT>::type;
using Input = Element<INPUT>::type;

// Load a lane's elements of a row, from the k-th on. Elements behind the end of the row are zeros;
// an e4m3 row ends with whole vectors.
template <bool kEarly, class Source>
KILN_FN Words part_of_row(const Source* row, int k, int inputs, bool aligned) {
  if (k >= inputs) return Words{};
  if constexpr (sizeof(Source) > 1)
    if (!aligned) return words_of(row + k, min(inputs - k, 8));
  if constexpr (kEarly) return load_early_vector<Words>(row + k);
  else return load_vector<Words>(row + k);
}

// A lane's elements of a chunk of x, for one tile of 8 rows. If row is null, they are zeros.
struct Inputs { Words words[kVectors]; };
KILN_FN Inputs load_inputs(const Input* row, int k, int inputs, bool aligned) {
  Inputs loaded{};
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (row)
      loaded.words[v] = part_of_row<false>(row, k + v * INPUT::kElements, inputs, aligned);
  return loaded;
}

// Multiply a chunk of 16 outputs, of which a lane has parts of two, by 8 rows of x.
KILN_FN void multiply(float (&sum)[4], const Words& low, const Words& high, const Inputs& x) {
  const auto u = WEIGHT::pairs<T>(low), v = WEIGHT::pairs<T>(high);
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const auto own = INPUT::pairs<T>(x.words[i]);
    constexpr int kPairs = INPUT::kElements / 2;
#pragma unroll
    for (int p = 0; p < kPairs; p += 2) {
      const int q = i * kPairs + p;
      mma_m16n8k16<T>(sum, {u.w[q], v.w[q], u.w[q + 1], v.w[q + 1]}, own.w[p], own.w[p + 1]);
    }
  }
}

// The scales of a lane's four sums. Sums of rows that do not exist are never written, so the scale
// of the last row stands in for theirs.
struct Scales {
  const float *of_low, *of_high;  // the scales of the outputs g and g + 8
  const float* of_x;              // x_scales; null if x is not e4m3
  int64_t row, column;            // strides of of_x
  int32_t rows;

  KILN_FN void add(float (&total)[4], float (&sum)[4], int tile, int index) const {
    const float scale[2] = {of_low[index], of_high[index]};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float own = scale[j / 2];
      if constexpr (INPUT::kElements > 8) {
        const int m = min(tile * 8 + int(threadIdx.x) % 4 * 2 + j % 2, rows - 1);
        own = mul_rn(own, of_x[m * row + index * column]);
      }
      total[j] = fma_rn(sum[j], own, total[j]);
      sum[j] = 0;
    }
  }
};

}  // namespace kiln

extern "C" __global__ void __launch_bounds__(512, 2)
skinny_gemm(SCALAR_T* out, const void* x, const void* weight, const float* x_scales,
            const float* scales, const SCALAR_T* bias, int64_t x_stride, int64_t weight_stride,
            int64_t out_stride, int64_t x_scale_row, int64_t x_scale_column, int32_t rows,
            int32_t outputs, int32_t inputs, int32_t scale_columns, int32_t outputs_log2,
            int32_t aligned) {
  kiln::pdl_reads_plan();
  using namespace kiln;
  __shared__ float sums[kWarps][TILES * 8][kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  const int first = blockIdx.x * kOutputs, own = lane % 4 * WEIGHT::kElements;
  const int low = min(first + group, outputs - 1), high = min(first + group + 8, outputs - 1);
  const Weight* row0 = static_cast<const Weight*>(weight) + low * weight_stride;
  const Weight* row1 = static_cast<const Weight*>(weight) + high * weight_stride;
  const Input* xs[TILES];
#pragma unroll
  for (int n = 0; n < TILES; ++n)
    xs[n] = n * 8 + group < rows ? static_cast<const Input*>(x) + (n * 8 + group) * x_stride
                                 : nullptr;
  // Where this warp's i-th chunk begins. A turn is two neighbouring chunks, then the next warp's.
  const auto at = [&](int i) { return ((i / 2 * kWarps + warp) * 2 + i % 2) * kChunk; };
  Words u[kAhead], v[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) {
    u[j] = part_of_row<true>(row0, at(j) + own, inputs, aligned);
    v[j] = part_of_row<true>(row1, at(j) + own, inputs, aligned);
  }
  pdl_wait();
  pdl_launch_dependents_last();
  const Scales factors{scales + (low >> outputs_log2) * int64_t(scale_columns),
                       scales + (high >> outputs_log2) * int64_t(scale_columns),
                       x_scales, x_scale_row, x_scale_column, rows};
  float sum[TILES][4] = {}, total[TILES][4] = {};
#pragma unroll 1
  for (int i = 0; at(i) < inputs; i += kAhead) {
    Inputs w[kAhead][TILES];
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
#pragma unroll
      for (int n = 0; n < TILES; ++n) w[j][n] = load_inputs(xs[n], at(i + j) + own, inputs, aligned);
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
#pragma unroll
      for (int n = 0; n < TILES; ++n) multiply(sum[n], u[j], v[j], w[j][n]);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      u[j] = part_of_row<true>(row0, at(i + kAhead + j) + own, inputs, aligned);
      v[j] = part_of_row<true>(row1, at(i + kAhead + j) + own, inputs, aligned);
    }
    if constexpr (SCALED == kByBlock)
      if ((i + kAhead) % 2 == 0)  // the pair is a block of inputs
#pragma unroll
        for (int n = 0; n < TILES; ++n) factors.add(total[n], sum[n], n, at(i) / kBlock);
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    if constexpr (SCALED == kByOutput) factors.add(total[n], sum[n], n, 0);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sums[warp][n * 8 + lane % 4 * 2 + j % 2][group + j / 2 * 8] =
          SCALED == kNone ? sum[n][j] : total[n][j];
  }
  __syncthreads();
  const int m = threadIdx.x / kOutputs, column = threadIdx.x % kOutputs, n = first + column;
  if (m >= rows || n >= outputs) return;
  float y = sums[0][m][column];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) y = add_rn(y, sums[w][m][column]);
  if (bias) y = add_rn(y, to_float(bias[n]));
  from_float(y, out[m * out_stride + n]);
}
