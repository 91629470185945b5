// out[m, n] = bias[n] + the sum over k of x[m, k] * (code[n, k] - zero[n, g]) * scale[n, g]
//
// The group of an input is g = k / GROUP, or 0 if GROUP = 0.
//   x, out          [rows, inputs] and [rows, outputs] of SCALAR_T; strides count elements. Rows of
//                   x begin at multiples of 16 bytes; inputs is a multiple of 8.
//   codes           WEIGHT = U4, E2M1: [experts, outputs, padded inputs / 2], as
//                   jit_kernels/ops/shared/four_bits.py packs them.
//                   WEIGHT = E4M3, I8: [experts, outputs, inputs]; inputs is a multiple of 16.
//                   Outputs are code_stride bytes apart, a multiple of 16.
//   scales, zeros   U4, E2M1: [experts, outputs, padded inputs / GROUP]. Scales of the padding are
//                   finite. U4: scales are float32, and zero points are 0 to 16. If zeros is null,
//                   all of them are 8.
//                   E2M1: a scale is a power of two, stored as its exponent plus 127. There are no
//                   zero points.
//                   E4M3, I8: float32 [experts, outputs >> outputs_log2 rounded up, scale_columns],
//                   a column for each GROUP inputs, or more. There are no zero points.
//   bias            [outputs] or null
//   ends            [experts] or null. If it is given, rows are sorted by expert, and those of
//                   expert e end at ends[e]. Rows behind the last end are not read or written.
//   aligned         whether 4 outputs of a row can be stored at once
// Work split: a block multiplies 128 outputs by up to TILE_ROWS rows of one expert. Each of its 4
// warps multiplies 32 of the outputs by all of these rows. The inputs are cut into 2^slices_log2
// slices. With split = 1 a block multiplies all slices one after the other, else each block of a
// cluster multiplies one. Either way the sums of the slices are added in the same order. The bits
// of a result depend on its row of x, its output's weights, `inputs`, `slices_log2` and the format.
// They do not depend on the other rows, TILE_ROWS, split or the number of experts. Tensor cores
// multiply x by code - zero, which SCALAR_T represents exactly; the scale multiplies the sum of a
// group in float32. Four lanes share a row. The inputs that a lane passes to an mma are those that
// it loaded, in an order that is the same for codes and x.
// Memory: cp.async fills a ring of tiles of codes and x; one block barrier for each tile. Codes
// never change, so they are loaded before the kernel ahead has ended, unless the block must know
// its expert first. Blocks of a cluster read each other's sums in shared memory.
// Compile-time parameters (jit_kernels/ops/quantized_linear/spec.py): SCALAR_T, WEIGHT, GROUP,
// TILE_ROWS.
#include "kiln/ptx/cluster.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/mma.cuh"
#include "kiln/ptx/store.cuh"
#include "kiln/rows/words.cuh"
#include "quantized_linear/rows.cuh"
#include "quantized_linear/weights.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef WEIGHT
#define WEIGHT U4
#endif
#ifndef GROUP
#define GROUP 128
#endif
#ifndef TILE_ROWS
#define TILE_ROWS 64
#endif

namespace kiln {

using T = SCALAR_T;
constexpr bool kBytes = WEIGHT::kBits == 8;
using Tile = Codes<WEIGHT>;
using X = Inputs<T, TILE_ROWS, WEIGHT::kBits>;
constexpr int kGroups = GROUP > 0 ? kChunk / GROUP : 1;  // of a tile
using Weights = Factors<T, WEIGHT, kGroups>;

constexpr int kTiles = TILE_ROWS / 8, kMostParts = 4;
constexpr int kStageBytes = Tile::kBytes + X::kBytes;
// Two blocks fit in an SM of 228 KB. Of 8-bit codes so do two of 32 rows in one of 164 KB.
constexpr bool kLarge = kLargeBytes > 100 * 1024, kMiddle = !kLarge && kLargeBlocks > 1;
constexpr int kStages = kBytes ? ((TILE_ROWS == 32) != kMiddle ? 3 : 2)
                        : TILE_ROWS == 32 ? 4 : kLarge ? 3 : 2;
constexpr int kPitch = kOutputs + 4;  // of sums, so that lanes store in different banks

// A lane's sums: of two tiles of 16 outputs, and of each 8 rows.
using Sums = float[2][kTiles][4];

KILN_FN int lane() { return threadIdx.x % 32; }
// The first of a lane's outputs: the others are 8, 16 and 24 further.
KILN_FN int own_output() { return threadIdx.x / 32 * 32 + lane() / 4; }

// A lane multiplies four pieces of a tile of x, each of eight inputs, in kSteps steps.
// More code at once would spill registers.
constexpr bool kTight = kBytes ? GROUP > 0 && TILE_ROWS > 32 : kStages < 3;
constexpr bool kFine = GROUP == 64 || kBytes;
constexpr int kSteps = GROUP == 32 || (kFine && kTight) ? 4 : kFine || kTight ? 2 : 1;
constexpr int kPieces = 4 / kSteps, kWords = kPieces * WEIGHT::kBits / 4;  // of a step
constexpr int kOfHalf = kBytes ? kSteps / 2 : kSteps;  // steps with 64 bytes of each row of codes

// A lane's codes of an output: of 4 bits those of a tile, of 8 bits those of a step. Some variants
// load only 8 bytes at a time, to save registers. Rows two apart then use the same banks.
struct alignas(kBytes ? kWords * 4 : 16) Part { uint32_t w[kBytes ? kWords : 4]; };
KILN_FN void load_codes(Part (&codes)[4], const unsigned char* tile, int step) {
  tile += step % kOfHalf * kWords * 4;
#pragma unroll
  for (int o = 0; o < 4; ++o)
    codes[o] = load_vector<Part>(
        tile + Tile::place(own_output() + 8 * o, 4 * (step / kOfHalf) + lane() % 4));
}

// Add a lane's part of the products of a step.
KILN_FN void multiply(Sums& sum, const Part (&codes)[4], const uint32_t (&zero)[4],
                      const unsigned char* x, int step) {
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    uint32_t a[4][4];
#pragma unroll
    for (int o = 0; o < 4; ++o) WEIGHT::unpack<T>(codes[o].w, j, zero[o], a[o]);
    const unsigned char* row = x + X::place(
        lane() / 4, kBytes ? 8 * (step / kOfHalf) + lane() % 4 * 2 + step % kOfHalf * kPieces + j
                           : 4 * (step * kPieces + j) + lane() % 4);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const Words b = load_vector<Words>(row + n * 8 * X::kPitch);
#pragma unroll
      for (int i = 0; i < 4; i += 2)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const auto &low = a[2 * m], &high = a[2 * m + 1];
          mma_m16n8k16<T>(sum[m][n], {low[i], high[i], low[i + 1], high[i + 1]}, b.w[i],
                          b.w[i + 1]);
        }
    }
  }
}

// Add the sums of a group times its scale.
KILN_FN void add_group(Sums& total, const Sums& part, const float (&scales)[kOutputs]) {
#pragma unroll
  for (int o = 0; o < 4; ++o) {
    const float scale = scales[own_output() + 8 * o];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& sum = total[o / 2][n][o % 2 * 2 + j];
        sum = fma_rn(part[o / 2][n][o % 2 * 2 + j], scale, sum);
      }
  }
}

// Multiply a tile of codes by one of x. Its steps are a loop, as more code at once would take more
// registers than there are.
KILN_FN void multiply_tile(Sums& total, const unsigned char* stage, const Weights::Place& factors) {
  constexpr int kOfGroup = kSteps / kGroups;
  Part codes[4];
  if (!kBytes) load_codes(codes, stage, 0);
#pragma unroll 1
  for (int q = 0; q < kGroups; ++q) {
    Sums part = {};
#pragma unroll 1
    for (int step = q * kOfGroup; step < (q + 1) * kOfGroup; ++step) {
      uint32_t zero[4] = {};
      if constexpr (WEIGHT::kZeros)
#pragma unroll
        for (int o = 0; o < 4; ++o) zero[o] = factors.zero[q][own_output() + 8 * o];
      if (kBytes) load_codes(codes, stage, step);
      multiply(GROUP > 0 ? part : total, codes, zero, stage + Tile::kBytes, step);
#pragma unroll
      for (int o = 0; o < 4; ++o)
#pragma unroll
        for (int j = 0; j + kPieces < 4 && !kBytes; ++j) codes[o].w[j] = codes[o].w[j + kPieces];
    }
    if (GROUP > 0) add_group(total, part, factors.scale[q]);
  }
}

// Add the sums of a slice to those of the slices before it, and begin with new ones.
KILN_FN void finish_slice(float* sums, Sums& total, const Weights::Place& factors, bool first) {
#pragma unroll
  for (int o = 0; o < 4; ++o) {
    const float scale = GROUP > 0 ? 1.0f : factors.scale[0][own_output() + 8 * o];
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& own = total[o / 2][n][o % 2 * 2 + j];
        float& sum = sums[(n * 8 + lane() % 4 * 2 + j) * kPitch + own_output() + 8 * o];
        const float y = GROUP > 0 ? own : mul_rn(own, scale);
        sum = first ? y : add_rn(sum, y);
        own = 0;
      }
  }
}

struct alignas(16) Floats4 { float v[4]; };

// A lane's four sums of a row, in the blocks of a cluster that have its slices, from `base` on.
struct RowSums {
  float* own;  // of row 0
  int base, parts;

  struct Parts { Floats4 y[kMostParts]; };
  KILN_FN Parts load(int row) const {
    Parts loaded = {};
    float* const at = own + row * kPitch;
    loaded.y[0] = load_vector<Floats4>(parts > 1 ? map_shared(at, base) : at);
#pragma unroll
    for (int p = 1; p < kMostParts; ++p)
      if (p < parts) loaded.y[p] = load_vector<Floats4>(map_shared(at, base + p));
    return loaded;
  }
  KILN_FN Floats4 add(const Parts& loaded) const {
    Floats4 y = loaded.y[0];
#pragma unroll
    for (int p = 1; p < kMostParts; ++p)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (p < parts) y.v[i] = add_rn(y.v[i], loaded.y[p].v[i]);
    return y;
  }
};

struct alignas(8) Half { uint32_t w[2]; };

// Store four outputs of a row, of which `left` exist.
KILN_FN void store_outputs(T* to, float (&y)[4], const T* bias, int left, bool aligned) {
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (bias && i < left) y[i] = add_rn(y[i], to_float(bias[i]));
  if (aligned && left >= 4) {
    store_global(to, Half{{pack<T>(y[0], y[1]), pack<T>(y[2], y[3])}});
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (i < left) from_float(y[i], to[i]);
}

}  // namespace kiln

extern "C" __global__ void KILN_CLUSTER(4, 1, 1) __launch_bounds__(128, 2)
quantized_gemm(SCALAR_T* out, const SCALAR_T* x, const uint8_t* codes,
               const kiln::Weights::Scale* scales, const short* zeros, const SCALAR_T* bias,
               const int32_t* ends, int64_t x_stride, int64_t out_stride, int32_t rows,
               int32_t outputs, int32_t inputs, int32_t experts, int32_t slices_log2, int32_t split,
               int32_t aligned, int32_t code_stride, int32_t scale_columns,
               int32_t outputs_log2) {
  kiln::pdl_reads_plan();
  using namespace kiln;
  __shared__ Weights::Place factors[2];
  unsigned char* const stages = dynamic_shared();
  float* const sums = reinterpret_cast<float*>(stages + kStages * kStageBytes);
  // Without clusters, the block of the first slice multiplies all of them.
  const int place = blockIdx.x, first = place / split * kOutputs, part = place % split;
  if (first >= outputs || (!kClusters && part > 0)) return;
  const bool apart = kClusters && split > 1;
  const int chunks = (inputs + kChunk - 1) / kChunk;
  const int columns = kBytes ? scale_columns : GROUP > 0 ? chunks * kGroups : 1;
  const int shared_log2 = kBytes ? outputs_log2 : 0;  // of the outputs that share scales
  const int of_row = kBytes ? code_stride : chunks, unit = kBytes ? 1 : Tile::kRowBytes;
  const int begin = apart ? chunks * part >> slices_log2 : 0;
  const int end = apart ? chunks * (part + 1) >> slices_log2 : chunks;
  if (ends) pdl_wait();
#pragma unroll 1
  for (int block = blockIdx.y;; block += gridDim.y) {
    Run run = run_of_rows<TILE_ROWS>(rows, block);
    if (ends) run = run_of_expert<TILE_ROWS>(ends, experts, block);
    if (run.count <= 0) return;
    const int64_t of_expert = int64_t(run.expert) * outputs;
    const Tile weights{codes + (of_expert + first) * of_row * unit, of_row * unit,
                       outputs - first, inputs};
    const X own{x + run.first * x_stride, x_stride, run.count, inputs};
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s)
      if (begin + s < end) weights.fetch(stages + s * kStageBytes, begin + s);
    pdl_wait();
    pdl_launch_dependents_last();
#pragma unroll 1
    for (int s = 0; s < kStages - 1; ++s) {
      if (begin + s < end) own.fetch(stages + s * kStageBytes + Tile::kBytes, begin + s);
      copy_commit();
    }
    const int last = outputs - first - 1;
    const int64_t of_scales = int64_t(run.expert) * ((outputs - 1 >> shared_log2) + 1);
    const Weights source{scales, zeros, (of_scales + (first >> shared_log2)) * columns,
                         (min(int(threadIdx.x), last) >> shared_log2) * columns};
    const auto begun = source.load(GROUP > 0 ? begin * kGroups : 0);
    auto next = begun;
    if (GROUP > 0 && begin + 1 < end) next = source.load((begin + 1) * kGroups);
    begun.store(factors[0]);

    Sums total = {};
    int slice = apart ? part : 0, stage = 0;
#pragma unroll 1
    for (int c = begin; c < end; ++c) {
      copy_wait<kStages - 2>();
      __syncthreads();  // the c-th tiles are there, and those before are free
      const int now = GROUP > 0 ? (c - begin) % 2 : 0;
      if (GROUP > 0) {
        if (c + 1 < end) next.store(factors[1 - now]);
        if (c + 2 < end) next = source.load((c + 2) * kGroups);
      }
      const int ahead = c + kStages - 1;
      if (ahead < end) {
        unsigned char* to = stages + (stage == 0 ? kStages - 1 : stage - 1) * kStageBytes;
        weights.fetch(to, ahead);
        own.fetch(to + Tile::kBytes, ahead);
      }
      copy_commit();
      multiply_tile(total, stages + stage * kStageBytes, factors[now]);
      stage = stage == kStages - 1 ? 0 : stage + 1;
      if (c + 1 == chunks * (slice + 1) >> slices_log2) {
        finish_slice(sums, total, factors[now], slice == (apart ? part : 0));
        ++slice;
      }
    }
    if (apart) cluster_sync();
    else __syncthreads();
    // Each block of a cluster stores some of the rows, each of its warps one at a time.
    const int own_part = apart ? part : 0, parts = apart ? split : 1;
    const RowSums at{sums + lane() * 4, int(cluster_rank()) - part, parts};
    const int n = first + lane() * 4;
    constexpr int kAtOnce = 2;  // rows whose loads are in flight
#pragma unroll 1
    for (int r = threadIdx.x / 32 * parts + own_part; r < run.count; r += 4 * parts * kAtOnce) {
      // Without values they would keep registers from the loop over tiles.
      RowSums::Parts of_row[kAtOnce] = {};
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (r + 4 * parts * i < run.count) of_row[i] = at.load(r + 4 * parts * i);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int m = r + 4 * parts * i;
        if (m >= run.count) break;
        Floats4 y = at.add(of_row[i]);
        store_outputs(out + (run.first + m) * out_stride + n, y.v, bias ? bias + n : nullptr,
                      outputs - n, aligned);
      }
    }
    if (apart) cluster_sync();  // before the sums that peers read are lost
  }
}
