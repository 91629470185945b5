// out[m, n] = bias[n] + the sum over k of x[m, k] * weight[n, k], for 1 to 8 * TILES rows of x
//
// GATE: none, or an activation of kiln/math/activations.cuh. With one, weight and bias have
// 2 * outputs rows, gates first, and out[m, n] = GATE(y[m, n]) * y[m, n + outputs]. y is the
// product above, rounded to SCALAR_T, so the bits are those of the product followed by act_and_mul.
// EXPERTS has no GATE.
// x: [rows, inputs], weight: [outputs, inputs], out: [rows, outputs], bias: [outputs] or null.
// Strides are counted in elements of the tensor. The formats of the weights:
//   Plain   SCALAR_T. Rows may begin at any address.
//   E4M3    8-bit floats. A row has a multiple of 64 of them, of 128 if SCALED = kByBlock.
//   I8      8-bit integers, with SCALED = kByOutput. A row has a multiple of 64 of them.
//   U4      4-bit integers in the order of jit_kernels/ops/shared/four_bits.py, with zeros behind
//           the inputs up to a multiple of 128. zeros: their zero points; null stands for 8.
//   E2M1    4-bit floats, in the same order, without zero points.
// If weights are codes, rows of weight and x begin and end at multiples of 16 bytes. x is SCALAR_T,
// or may have the same format as E4M3 and I8 weights. SCALED: what shares a scale and zero point:
//   kNone                  there are no scales
//   kByOutput              all inputs of an output; of x, all inputs of a row
//   kByBlock, kBy64, kBy32 128, 64 or 32 inputs of an output; or, with outputs_log2 = 7, 128 inputs
//                          of 128 outputs; of x, 128 inputs of a row
// scales, zeros: [outputs >> outputs_log2, scale_columns]. x_scales has two strides.
// EXPERTS = true: weight, scales, zeros and bias have a dimension of experts in front. Rows are
// sorted by expert: expert_of [rows] has that of each, and those of expert e end at ends[e]. Rows
// behind the last end are neither read nor written.
// Work split: a block multiplies 16 * TILES rows of weights at a time. That is as many outputs, or
// half as many with a GATE. If the grid has too few blocks for all outputs, a block then does the
// work of block blockIdx.x + gridDim.x, and so on. With experts a block multiplies up to 8 * TILES
// rows of one expert. Its 16 warps take turns along the inputs: each multiplies 128 bytes of every
// row of weights at a time, or 64 bytes of 4-bit codes. The sums of the warps are added in a fixed
// order. The bits of a result depend on its row of x, its output's weights, `inputs` and the
// formats. They do not depend on the other rows, the number of outputs, TILES, the grid or EXPERTS.
// Memory: weights never change, so they are loaded before the kernel ahead has ended. With experts
// they are not, because that kernel may still write which expert has which rows. Loads go straight
// into registers; shared memory holds the sums of the warps.
// Compile-time parameters (jit_kernels/ops/linear/spec.py): SCALAR_T, WEIGHT, INPUT, SCALED, TILES,
// EXPERTS, GATE.
#include "kiln/math/exact.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/mma.cuh"
#include "linear/experts.cuh"
#include "linear/gate.cuh"
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
#ifndef EXPERTS
#define EXPERTS false
#endif
#ifndef GATE
#define GATE none
#endif

namespace kiln {

enum Scaled { kNone, kByOutput, kBy32 = 32, kBy64 = 64, kByBlock = 128 };  // inputs of a scale

constexpr int kWarps = 16, kBlock = 128;
constexpr int kChunk = 4 * WEIGHT::kElements;  // inputs that a warp loads at a time
constexpr int kPieces = WEIGHT::kElements / 8;
constexpr int kVectors = WEIGHT::kElements / INPUT::kElements;  // of x, for one of the weights
constexpr bool kCodes = WEIGHT::kElements > 8, kFourBits = WEIGHT::kElements > 16;
constexpr int kTurn = kFourBits ? 1 : 2;  // neighbouring chunks that a warp multiplies in turn
constexpr int kGroups = kFourBits && SCALED > 1 ? kChunk / SCALED : 1;  // of a chunk
constexpr int kAhead = kFourBits ? 1 : 2;  // chunks in flight
constexpr int kStep = kTurn * kWarps * kChunk;  // inputs from one turn of a warp to the next
constexpr int kAtOnce = kFourBits ? 1 : kAhead;  // chunks of x in flight
constexpr int kWindow = kFourBits ? 2 : kVectors;  // vectors of x in flight, of each of them
// With two tiles a block multiplies 32 rows of weights, so that it loads x half as often.
constexpr bool kGated = kGates<GATE>;
constexpr int kSets = TILES, kOfSet = kGated ? 8 : 16, kOutputs = kSets * kOfSet;
constexpr int kBlocks = 3 - kSets, kBuffers = 3 - kSets;  // of a multiprocessor, of sums
constexpr int kPitch = kSets * 16 + 4;  // of sums, so that lanes store in different banks

using T = SCALAR_T;
template <class Format> struct Element { using type = uint8_t; };
template <> struct Element<Plain> { using type = T; };
using Weight = Element<WEIGHT>::type;
using Input = Element<INPUT>::type;
using Scale = WEIGHT::Scale;

// Load a lane's elements of a row, from p on, which is the k-th. Elements behind the end of the row
// are zeros; a row of codes ends with whole vectors.
template <bool kEarly, class Source>
KILN_FN Words part_of_row(const Source* p, int k, int inputs, bool aligned) {
  if (k >= inputs) return Words{};
  if constexpr (!kCodes)
    if (!aligned) return words_of(p, min(inputs - k, 8));
  if constexpr (kEarly) return load_early_vector<Words>(p);
  else return load_vector<Words>(p);
}

// A lane's elements of a chunk of x, kWindow vectors from the v-th on, for one tile of 8 rows. row:
// the lane's first element of the chunk, which is input k.
struct Inputs { Words words[kWindow]; };
KILN_FN Inputs load_inputs(const Input* row, int k, int v, int inputs, bool aligned) {
  constexpr int kStep = kFourBits ? 32 : INPUT::kElements;
  Inputs loaded{};
#pragma unroll
  for (int w = v; w < v + kWindow; ++w)
    loaded.words[w - v] = part_of_row<false>(row + w * kStep, k + w * kStep, inputs, aligned);
  return loaded;
}

// Weights of a chunk, of two outputs, with what belongs to 4-bit codes.
struct Chunk {
  Words low, high;
  Groups<WEIGHT, kGroups> of_low, of_high;
};

// Where a lane loads its weights of two outputs: at input k, chunk by chunk.
struct Walk {
  const Weight *low, *high;     // rows of weights, at input k
  int32_t of_low, of_high, k;   // of the groups at input k in scales and zeros

  // Load a chunk. If it lies behind the end of the row, nothing is loaded: floats and 8-bit codes
  // become zeros. 4-bit codes keep their old values, which are not multiplied again.
  KILN_FN void load(Chunk& chunk, const Scale* scales, const short* zeros, int inputs,
                    bool aligned) const {
    if constexpr (kFourBits) {
      const bool wanted = k < inputs;
      load_early_if(wanted, chunk.low.w, low);
      load_early_if(wanted, chunk.high.w, high);
      chunk.of_low.load(scales, zeros, of_low, wanted);
      chunk.of_high.load(scales, zeros, of_high, wanted);
    } else {
      chunk.low = part_of_row<true>(low, k, inputs, aligned);
      chunk.high = part_of_row<true>(high, k, inputs, aligned);
    }
  }
  // Go on to the next chunk of this warp; c: which one of a turn this is.
  KILN_FN void advance(int c) {
    const int step = (c % kTurn < kTurn - 1 ? 1 : kTurn * (kWarps - 1) + 1) * kChunk;
    low += kFourBits ? step / 2 : step;
    high += kFourBits ? step / 2 : step;
    if constexpr (kFourBits && SCALED > 1) {
      of_low += step / SCALED;
      of_high += step / SCALED;
    }
    k += step;
  }
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
  const Scale* scales;
  int of_low, of_high;  // of the outputs g and g + 8 in scales
  const float* of_x;    // x_scales; null if x is not of codes
  int row, column;      // strides of of_x
  Run run;

  KILN_FN void add(float (&total)[4], float (&sum)[4], int tile, int index) const {
    const float scale[2] = {float(scales[of_low + index]), float(scales[of_high + index])};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float own = scale[j / 2];
      if constexpr (INPUT::kElements > 8) {
        const int m = min(tile * 8 + int(threadIdx.x) % 4 * 2 + j % 2, run.count - 1);
        own = mul_rn(own, of_x[(run.first + m) * row + index * column]);
      }
      total[j] = fma_rn(sum[j], own, total[j]);
      sum[j] = 0;
    }
  }
};

}  // namespace kiln

extern "C" __global__ void __launch_bounds__(512, kiln::kBlocks)
skinny_gemm(SCALAR_T* out, const void* x, const void* weight, const float* x_scales,
            const kiln::Scale* scales, const short* zeros, const SCALAR_T* bias,
            const int32_t* expert_of, const int32_t* ends, int64_t x_stride, int64_t weight_stride,
            int64_t out_stride, int64_t expert_weights, int32_t x_scale_row,
            int32_t x_scale_column, int32_t expert_scales, int32_t rows, int32_t outputs,
            int32_t inputs, int32_t scale_columns, int32_t outputs_log2, int32_t num_experts,
            int32_t aligned) {
  kiln::pdl_reads_plan();
  using namespace kiln;
  __shared__ float sums[kBuffers][kWarps][TILES * 8][kPitch];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4;
  Run run{0, 0, rows};
  if constexpr (EXPERTS) {
    pdl_wait();
    run = run_of_block<8 * TILES>(expert_of, ends, rows, num_experts);
    if (run.count == 0) return;
  }
  // The lane's two rows of weights: of the 16 outputs from `first` on, or gate and up of 8 outputs.
  // The last output stands in for those behind.
  const auto own = [&](int first, int more) {
    if (kGated) return min(first + group, outputs - 1) + (more ? outputs : 0);
    return min(first + group + more, outputs - 1);
  };
  const int begin = warp * kTurn * kChunk;  // of this warp's first turn
  const auto walk_of = [&](int first) {
    const int low = own(first, 0), high = own(first, 8), g = SCALED > 1 ? begin / SCALED : 0;
    const int at = (begin + lane % 4 * WEIGHT::kElements) / (kFourBits ? 2 : 1);
    const Weight* weights = static_cast<const Weight*>(weight) + run.expert * expert_weights + at;
    const int of_expert = run.expert * expert_scales + g;
    return Walk{weights + low * weight_stride, weights + high * weight_stride,
                of_expert + low * scale_columns, of_expert + high * scale_columns,
                first < outputs ? begin + (kFourBits ? 0 : at - begin) : inputs};
  };
  Chunk chunks[kAhead][kSets];
  Walk ahead[kSets];
  const auto start = [&](int first) {  // load the first chunks of these outputs
#pragma unroll
    for (int s = 0; s < kSets; ++s) {
      ahead[s] = walk_of(first + s * kOfSet);
#pragma unroll
      for (int c = 0; c < kAhead; ++c) {
        ahead[s].load(chunks[c][s], scales, zeros, inputs, aligned);
        ahead[s].advance(c);
      }
    }
  };
  int first = blockIdx.x * kOutputs, buffer = 0;
  start(first);
  pdl_wait();
  pdl_launch_dependents_last();
  float sum[kSets][TILES][4] = {}, total[kSets][TILES][4] = {};
  const auto add_scaled = [&](int s, int n, int index) {
    if constexpr (kCodes && !(kFourBits && SCALED > 1)) {
      const int low = own(first + s * kOfSet, 0), high = own(first + s * kOfSet, 8);
      const int of_expert = run.expert * expert_scales;
      const Scales factors{scales, of_expert + (low >> outputs_log2) * scale_columns,
                           of_expert + (high >> outputs_log2) * scale_columns,
                           x_scales, x_scale_row, x_scale_column, run};
      factors.add(total[s][n], sum[s][n], n, index);
    }
  };
#pragma unroll 1
  for (; first < outputs; first += gridDim.x * kOutputs, buffer = kBuffers - 1 - buffer) {
    // The lane's rows of x. For those that do not exist, the last one: its sums are not written.
    const Input* xs[TILES];
    const int own_x = begin + lane % 4 * (kFourBits ? 8 : WEIGHT::kElements);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int m = run.first + min(n * 8 + group, run.count - 1);
      xs[n] = static_cast<const Input*>(x) + m * x_stride + own_x;
      keep_global(xs[n]);
    }
#pragma unroll 1
    for (int k = own_x; k - own_x + begin < inputs; k += kStep) {
#pragma unroll
      for (int c = 0; c < kTurn; c += kAtOnce) {
#pragma unroll
        for (int v = 0; v < kVectors; v += kWindow) {
          Inputs w[kAtOnce][TILES];
#pragma unroll
          for (int a = 0; a < kAtOnce; ++a)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
              w[a][n] = load_inputs(xs[n] + (c + a) * kChunk, k + (c + a) * kChunk, v, inputs,
                                    aligned);
#pragma unroll
          for (int a = 0; a < kAtOnce; ++a)
#pragma unroll
            for (int s = 0; s < kSets; ++s)
#pragma unroll
              for (int n = 0; n < TILES; ++n)
                multiply(total[s][n], sum[s][n], chunks[(c + a) % kAhead][s], w[a][n], v);
        }
#pragma unroll
        for (int a = 0; a < kAtOnce; ++a)
#pragma unroll
          for (int s = 0; s < kSets; ++s) {
            ahead[s].load(chunks[(c + a) % kAhead][s], scales, zeros, inputs, aligned);
            ahead[s].advance(c + kAhead + a);
          }
      }
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        if constexpr (!kFourBits && SCALED == kByBlock)
#pragma unroll
          for (int s = 0; s < kSets; ++s) add_scaled(s, n, k / kBlock);
        xs[n] += kStep;
      }
    }
    if (first + gridDim.x * kOutputs < outputs) start(first + gridDim.x * kOutputs);
#pragma unroll
    for (int s = 0; s < kSets; ++s)
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        if constexpr (SCALED == kByOutput) add_scaled(s, n, 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int row = n * 8 + lane % 4 * 2 + j % 2, column = s * 16 + group + j / 2 * 8;
          sums[buffer][warp][row][column] =
              SCALED == kNone ? sum[s][n][j] : mul_rn(total[s][n][j], WEIGHT::restore<T>());
          sum[s][n][j] = total[s][n][j] = 0;
        }
      }
    __syncthreads();  // also before another buffer is written again
    const int m = threadIdx.x / kOutputs, column = threadIdx.x % kOutputs, n = first + column;
    const auto total_of = [&](int place, int n) {
      float y = sums[buffer][0][m][place];
#pragma unroll
      for (int w = 1; w < kWarps; ++w) y = add_rn(y, sums[buffer][w][m][place]);
      return bias ? add_rn(y, to_float(bias[int64_t(run.expert) * outputs + n])) : y;
    };
    if (m < run.count && n < outputs) {
      const int place = kGated ? column / 8 * 16 + column % 8 : column;
      float y = total_of(place, n);
      if constexpr (kGated) y = gated<T, GATE>(y, total_of(place + 8, n + outputs));
      from_float(y, out[(run.first + m) * out_stride + n]);
    }
    if constexpr (kBuffers == 1) __syncthreads();
  }
}
