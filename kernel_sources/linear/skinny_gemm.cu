// out[m, n] = bias[n] + the sum over k of x[m, k] * weight[n, k], for 1 to 8 * TILES rows of x
//
// x: [rows, inputs] and weight: [outputs, inputs] are SCALAR_T or codes, which are multiplied by
// scales. WEIGHT = E4M3: SCALED = kByOutput: one scale for each output, and in x one for each row.
// kByBlock: one for each 128 inputs of these, or of 128 outputs (outputs_log2 = 7). scales:
// [outputs >> outputs_log2, scale_columns]. x_scales: [rows, 1 or inputs / 128]. WEIGHT = U4, E2M1:
// codes of 4 bits in the order of jit_kernels/ops/shared/four_bits.py; SCALED says how many inputs
// share a scale and a zero point. zeros: like scales, or null: 8. bias: [outputs] or null.
// Strides are counted in elements of the tensor. Rows of codes begin at multiples of 16 bytes. Rows
// of e4m3 have a multiple of 64 elements, of 128 if SCALED = kByBlock; those of 4-bit codes have
// zeros up to a multiple of 128. Other tensors may have any size and alignment.
// Experts: if experts [rows] is given, weight, scales, zeros and bias have a dimension of experts in
// front. Row m of x is multiplied by those of experts[m]. Rows are sorted by expert, whose rows end
// at ends[expert]; rows behind ends[num_experts - 1] are not multiplied.
// Work split: a block computes 16 outputs, with experts for up to 8 * TILES rows of one of them. Its
// 16 warps take turns: each multiplies 128 bytes of every row at a time, or 64 of 4-bit codes. The
// sums of the warps are added in a fixed order. The bits of a result depend on its row of x, its
// output's weights, `inputs` and the formats; they do not depend on the other rows, on the number
// of outputs, on TILES, or on experts.
// Memory: weights never change, so they are loaded before the kernel ahead has ended, unless it
// may say which expert. Loads go straight into registers; shared memory holds the sums of the warps.
// Compile-time parameters (jit_kernels/ops/linear/spec.py): SCALAR_T, WEIGHT, INPUT, SCALED, TILES.
#include "kiln/math/exact.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/mma.cuh"
#include "linear/groups.cuh"

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

enum Scaled { kNone, kByOutput, kBy32 = 32, kBy64 = 64, kByBlock = 128 };  // inputs of a scale

constexpr int kWarps = 16, kOutputs = 16, kBlock = 128;
constexpr int kChunk = 4 * WEIGHT::kElements;  // inputs that a warp loads at a time
constexpr int kPieces = WEIGHT::kElements / 8;
constexpr int kVectors = WEIGHT::kElements / INPUT::kElements;  // of x, for one of the weights
constexpr bool kCodes = WEIGHT::kElements > 8, kFourBits = WEIGHT::kElements > 16;
constexpr int kTurn = kFourBits ? 1 : 2;  // neighbouring chunks that a warp multiplies in turn
constexpr int kGroups = kFourBits && SCALED > 1 ? kChunk / SCALED : 1;  // of a chunk
constexpr bool kManyFloats = kGroups * sizeof(WEIGHT::Scale) > 4;  // are the scales of a chunk
// Chunks in flight, as registers allow.
constexpr int kAhead = kManyFloats || (kCodes && TILES > 1) ? 1 : 2;
constexpr int kAtOnce = kFourBits ? 1 : kAhead;  // chunks of x in flight
constexpr int kWindow = kFourBits ? 1 : kVectors;  // vectors of x in flight, of each of them
constexpr int kPitch = kOutputs + 4;  // of sums, so that lanes store in different banks

using T = SCALAR_T;
template <class Format> struct Element { using type = uint8_t; };
template <> struct Element<Plain> { using type = T; };
using Weight = Element<WEIGHT>::type;
using Input = Element<INPUT>::type;
using Scale = WEIGHT::Scale;

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

// A lane's weights of a chunk that begins at input k.
KILN_FN Words load_weights(const Weight* row, int k, int inputs, bool aligned) {
  const int own = threadIdx.x % 4 * WEIGHT::kElements;
  if constexpr (!kFourBits) return part_of_row<true>(row, k + own, inputs, aligned);
  else return k < inputs ? load_early_vector<Words>(row + (k + own) / 2) : Words{};
}

// A lane's elements of a chunk of x, kWindow vectors from the v-th on, for one tile of 8 rows. If
// row is null, they are zeros.
struct Inputs { Words words[kWindow]; };
KILN_FN Inputs load_inputs(const Input* row, int k, int v, int inputs, bool aligned) {
  constexpr int kOwn = kFourBits ? 8 : WEIGHT::kElements, kStep = kFourBits ? 32 : INPUT::kElements;
  Inputs loaded{};
  k += threadIdx.x % 4 * kOwn + v * kStep;
#pragma unroll
  for (int w = 0; w < kWindow; ++w)
    if (row) loaded.words[w] = part_of_row<false>(row, k + w * kStep, inputs, aligned);
  return loaded;
}

// Weights of a chunk, of two outputs, with what belongs to 4-bit codes.
struct Chunk {
  Words low, high;
  Groups<WEIGHT, kGroups> of_low, of_high;
};

// Multiply 16 outputs, of which a lane has parts of two, by 8 rows of x: the part of a chunk that
// belongs to a window of x. Sums of 4-bit codes are multiplied by the scale of their group, and
// added to the total.
KILN_FN void multiply(float (&total)[4], float (&sum)[4], const Chunk& chunk, const Inputs& x,
                      int v) {
  constexpr int kOfVector = INPUT::kElements / 8;
#pragma unroll
  for (int i = 0; i < kWindow * kOfVector; ++i) {
    const int piece = v * kOfVector + i, g = piece * kGroups / kPieces;
    const auto low = WEIGHT::piece<T>(chunk.low, piece, chunk.of_low.zero_pair<T>(g));
    const auto high = WEIGHT::piece<T>(chunk.high, piece, chunk.of_high.zero_pair<T>(g));
    const auto own = INPUT::piece<T>(x.words[i / kOfVector], i % kOfVector, 0);
#pragma unroll
    for (int p = 0; p < 4; p += 2)
      mma_m16n8k16<T>(sum, {low.w[p], high.w[p], low.w[p + 1], high.w[p + 1]}, own.w[p],
                      own.w[p + 1]);
    if (kFourBits && SCALED > 1 && (piece + 1) * kGroups % kPieces == 0)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total[j] = fma_rn(sum[j], (j < 2 ? chunk.of_low : chunk.of_high).scale(g), total[j]);
        sum[j] = 0;
      }
  }
}

// The scales of a lane's four sums. Sums of rows that do not exist are never written, so the scale
// of the last row stands in for theirs.
struct Scales {
  const Scale *of_low, *of_high;  // the scales of the outputs g and g + 8
  const float* of_x;              // x_scales; null if x is not e4m3
  int64_t row, column;            // strides of of_x
  int32_t rows;

  KILN_FN void add(float (&total)[4], float (&sum)[4], int tile, int index) const {
    const float scale[2] = {float(of_low[index]), float(of_high[index])};
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
            const kiln::Scale* scales, const short* zeros, const SCALAR_T* bias,
            const int32_t* experts, const int32_t* ends, int64_t x_stride, int64_t weight_stride,
            int64_t out_stride, int64_t x_scale_row, int64_t x_scale_column,
            int64_t expert_weights, int64_t expert_scales, int32_t rows, int32_t outputs,
            int32_t inputs, int32_t scale_columns, int32_t outputs_log2, int32_t num_experts,
            int32_t aligned) {
  kiln::pdl_reads_plan();
  using namespace kiln;
  __shared__ float sums[kWarps][TILES * 8][kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  const int first = blockIdx.x * kOutputs;
  const int low = min(first + group, outputs - 1), high = min(first + group + 8, outputs - 1);
  const Weight* row0 = static_cast<const Weight*>(weight) + low * weight_stride;
  const Weight* row1 = static_cast<const Weight*>(weight) + high * weight_stride;
  const Input* x0 = static_cast<const Input*>(x);
  if (experts) {
    pdl_wait();
    const int m = blockIdx.y;
    if (m >= ends[num_experts - 1]) return;
    const int expert = experts[m], begin = expert ? ends[expert - 1] : 0;
    if ((m - begin) % (8 * TILES)) return;  // another block multiplies this row
    rows = min(ends[expert] - m, 8 * TILES);
    x0 += m * x_stride;
    out += m * out_stride;
    row0 += expert * expert_weights;
    row1 += expert * expert_weights;
    scales += expert * expert_scales;
    if (x_scales) x_scales += m * x_scale_row;
    if (zeros) zeros += expert * expert_scales;
    if (bias) bias += int64_t(expert) * outputs;
  }
  const int scale_row0 = (low >> outputs_log2) * scale_columns;
  const int scale_row1 = (high >> outputs_log2) * scale_columns;
  // Where this warp's i-th chunk begins. A turn is kTurn neighbouring chunks, then the next warp's.
  const auto at = [&](int i) { return ((i / kTurn * kWarps + warp) * kTurn + i % kTurn) * kChunk; };
  const auto load = [&](int i) {
    Chunk chunk{};
    chunk.low = load_weights(row0, at(i), inputs, aligned);
    chunk.high = load_weights(row1, at(i), inputs, aligned);
    if constexpr (kFourBits) {
      const int g = SCALED > 1 ? at(i) / SCALED : 0;
      if (at(i) < inputs) {
        chunk.of_low.load(scales, zeros, scale_row0 + g);
        chunk.of_high.load(scales, zeros, scale_row1 + g);
      }
    }
    return chunk;
  };
  Chunk chunks[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) chunks[j] = load(j);
  pdl_wait();
  pdl_launch_dependents_last();
  const Input* xs[TILES];
#pragma unroll
  for (int n = 0; n < TILES; ++n)
    xs[n] = n * 8 + group < rows ? x0 + (n * 8 + group) * x_stride : nullptr;
  float sum[TILES][4] = {}, total[TILES][4] = {};
  const auto add_scaled = [&](int n, int index) {
    if constexpr (kCodes && !(kFourBits && SCALED > 1)) {
      const Scales factors{scales + scale_row0, scales + scale_row1, x_scales,
                           x_scale_row, x_scale_column, rows};
      factors.add(total[n], sum[n], n, index);
    }
  };
#pragma unroll 1
  for (int i = 0; at(i) < inputs; i += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; j += kAtOnce) {
#pragma unroll
      for (int v = 0; v < kVectors; v += kWindow) {
        Inputs w[kAtOnce][TILES];
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
          for (int n = 0; n < TILES; ++n)
            w[c][n] = load_inputs(xs[n], at(i + j + c), v, inputs, aligned);
#pragma unroll
        for (int c = 0; c < kAtOnce; ++c)
#pragma unroll
          for (int n = 0; n < TILES; ++n) multiply(total[n], sum[n], chunks[j + c], w[c][n], v);
      }
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) chunks[j + c] = load(i + kAhead + j + c);
    }
    if constexpr (!kFourBits && SCALED == kByBlock)
      if ((i + kAhead) % 2 == 0)  // the pair is a block of inputs
#pragma unroll
        for (int n = 0; n < TILES; ++n) add_scaled(n, at(i) / kBlock);
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    if constexpr (SCALED == kByOutput) add_scaled(n, 0);
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
