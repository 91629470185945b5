// lora_expand for bf16 and fp16, on tensor cores. The rows of an mma are tokens, and its columns
// are columns of out. h is float32, and an mma takes numbers of T: each element of h is split into
// the sum of two numbers of T, which keeps at least 16 bits of it.
//
// A lane loads 4 neighbours of h and of B at a time, and 8 of out, straight into registers. So the
// ranks and the columns have another order in an mma than in memory. With g = lane / 4 and
// t = lane % 4, for 16 ranks and 32 columns:
//   ranks 4t and 4t + 1 are the mma's 2t and 2t + 1, ranks 4t + 2 and 4t + 3 its 2t + 8 and 2t + 9;
//   column 4g + n is column g of mma n, one of four. So a lane's sums are those of columns 8t to
//   8t + 7: it has columns 2t and 2t + 1 of each mma.
#pragma once
#include "kiln/math/reduce.cuh"
#include "kiln/ptx/mma.cuh"
#include "lora/expand_fma.cuh"

namespace kiln {

constexpr int kRanks = 16, kRows = 16;  // of an mma: ranks, and tokens
constexpr int kHalves = kWarpColumns / 32;

struct alignas(16) Floats { float x[4]; };
struct alignas(8) Four { uint32_t w[2]; };    // neighbours of a row of B
struct alignas(16) Eight { uint32_t w[4]; };  // neighbours of a row of out

template <class T> constexpr bool kNarrow = false;  // whether its range is smaller than float32's
template <> constexpr bool kNarrow<fp16> = true;

template <class T> KILN_FN float low_half(uint32_t pair) { return to_float(T{uint16_t(pair)}); }
template <class T> KILN_FN float high_half(uint32_t pair) {
  return to_float(T{uint16_t(pair >> 16)});
}

// Whether each row of B, h and out can be loaded in vectors: of 4, 4 and 8 elements.
template <class T> KILN_FN bool is_aligned(const Tile<T>& tile) {
  const uint64_t starts =
      reinterpret_cast<uint64_t>(tile.h) | reinterpret_cast<uint64_t>(tile.out);
  return starts % 16 == 0 && reinterpret_cast<uint64_t>(tile.b) % 8 == 0 && tile.size % 8 == 0 &&
         tile.out_stride % 8 == 0 && tile.h_stride % 4 == 0 && tile.rank % 4 == 0;
}

// Load 4 columns of B from o on, for rank k; those that do not exist are zeros.
template <class T> KILN_FN Four four_of_b(const Tile<T>& tile, int k, int o) {
  if (k >= tile.rank || o >= tile.size) return Four{};
  return load_early_vector<Four>(tile.b + int64_t(k) * tile.size + o);
}

// A lane's part of 16 ranks of B: 4 ranks, and 4 columns of each half of the warp's columns.
struct RanksOfB { Four rows[4][kHalves]; };

// Load it for the ranks from `start` on, and the columns from `first` on.
template <class T>
KILN_FN RanksOfB ranks_of_b(const Tile<T>& tile, int start, int first) {
  const int lane = threadIdx.x % 32;
  RanksOfB b;
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      b.rows[i][half] = four_of_b(tile, start + lane % 4 * 4 + i,
                                            first + half * 32 + lane / 4 * 4);
  return b;
}

// Return column n, 0 to 3, of two ranks, as an mma takes it.
KILN_FN uint32_t pair_of(const Four& low, const Four& high, int n) {
  const uint32_t a = low.w[n / 2], b = high.w[n / 2];
  return n % 2 ? a >> 16 | (b & 0xffff0000u) : (a & 0xffffu) | b << 16;
}

// Load 4 elements of a token's h, from rank k on; those that do not exist are zeros.
template <class T> KILN_FN Floats four_of_h(const Tile<T>& tile, int token, int k) {
  if (token < 0 || k >= tile.rank) return Floats{};
  return load_vector<Floats>(tile.h + token * tile.h_stride + k);
}

// The range of fp16 is smaller than float32's. So before a token's h is split it is multiplied by
// `by`, the power of two that brings its largest element between 1 and 2. The sums are multiplied
// by `back`, which is 1 / by.
struct RowScale { float by, back; };
template <class T> KILN_FN RowScale scale_of_row(const Tile<T>& tile, int token) {
  float most = 0;
#pragma unroll 1
  for (int k = int(threadIdx.x) % 4 * 4; k < tile.rank; k += 16) {
    const Floats h = four_of_h(tile, token, k);
#pragma unroll
    for (int j = 0; j < 4; ++j) most = fmaxf(most, fabsf(h.x[j]));
  }
  __syncwarp();
  const uint32_t exponent = as_uint(quad_max(most)) >> 23;
  if (exponent == 0 || exponent > 253) return {1.0f, 1.0f};
  return {as_float((254 - exponent) << 23), as_float(exponent << 23)};
}

// Split two elements of h, each into two numbers of T whose sum it is.
template <class T>
KILN_FN void split(float a, float b, RowScale scale, uint32_t& high, uint32_t& low) {
  if constexpr (kNarrow<T>) a = mul_rn(a, scale.by), b = mul_rn(b, scale.by);
  high = pack<T>(a, b);
  low = pack<T>(a - low_half<T>(high), b - high_half<T>(high));
}

// The elements of h for 16 tokens and 16 ranks as an mma takes them, in two numbers of T each.
struct SplitRanks { uint32_t high[4], low[4]; };

template <class T>
KILN_FN SplitRanks ranks_of_h(const Tile<T>& tile, const int (&tokens)[2],
                              const RowScale (&scale)[2], int start) {
  SplitRanks h;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const Floats four = four_of_h(tile, tokens[j], start + int(threadIdx.x) % 4 * 4);
    split<T>(four.x[0], four.x[1], scale[j], h.high[j], h.low[j]);
    split<T>(four.x[2], four.x[3], scale[j], h.high[j + 2], h.low[j + 2]);
  }
  return h;
}

template <class T>
KILN_FN void multiply(float (&sum)[4][4], const SplitRanks& h, const RanksOfB& b, int half) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const uint32_t b0 = pair_of(b.rows[0][half], b.rows[1][half], n);
    const uint32_t b1 = pair_of(b.rows[2][half], b.rows[3][half], n);
    mma_m16n8k16<T>(sum[n], h.high, b0, b1);
    mma_m16n8k16<T>(sum[n], h.low, b0, b1);
  }
}

// Add a lane's sums of 8 columns of a token to y. j: 0 or 1, which of the lane's two tokens.
template <class T>
KILN_FN Eight added(Eight y, const float (&sum)[4][4], int j, RowScale row, float scale) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    float own[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      own[i] = sum[w % 2 * 2 + i][2 * j + w / 2];
      if constexpr (kNarrow<T>) own[i] = mul_rn(own[i], row.back);
      own[i] = mul_rn(own[i], scale);
    }
    y.w[w] =
        pack<T>(add_rn(low_half<T>(y.w[w]), own[0]), add_rn(high_half<T>(y.w[w]), own[1]));
  }
  return y;
}

// Add this warp's columns for up to 16 tokens. A lane has two of them. b: the ranks 0 to 15.
template <class T>
KILN_FN void add_rows(const Tile<T>& tile, const int (&tokens)[2], const RanksOfB& b, int first) {
  const int column = first + int(threadIdx.x) % 4 * 8;
  T* rows[2];
  Eight y[2][kHalves] = {};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    rows[j] = tile.out + tokens[j] * tile.out_stride;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const int o = column + half * 32;
      if (tokens[j] >= 0 && o < tile.size) y[j][half] = load_vector<Eight>(rows[j] + o);
    }
  }
  RowScale scale[2] = {};
  if constexpr (kNarrow<T>)
    for (int j = 0; j < 2; ++j) scale[j] = scale_of_row(tile, tokens[j]);
  const SplitRanks h = ranks_of_h(tile, tokens, scale, 0);
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    float sum[4][4] = {};
    multiply<T>(sum, h, b, half);
#pragma unroll 1
    for (int start = kRanks; start < tile.rank; start += kRanks)
      multiply<T>(sum, ranks_of_h(tile, tokens, scale, start),
                  ranks_of_b(tile, start, first), half);
    const int o = column + half * 32;
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (tokens[j] >= 0 && o < tile.size)
        store_vector(rows[j] + o, added<T>(y[j][half], sum, j, scale[j], tile.scale));
  }
}

// Add the adapter's part to this warp's columns, from `first` on, for all tokens of a tile. It
// calls pdl_wait before it reads h and out.
template <class T> KILN_FN void add_tile(const Tile<T>& tile, int first) {
  if (!is_aligned(tile)) return add_by_fma(tile, first);
  const int group = threadIdx.x % 32 / 4;
  const RanksOfB b = ranks_of_b(tile, 0, first);
  int tokens[2] = {load_early(tile.tokens + group), -1};
  if (tile.count > 8) tokens[1] = load_early(tile.tokens + group + 8);
  pdl_wait();
  pdl_launch_dependents();
  for (int place = 0; place < tile.count; place += kRows) {
    if (place) {
      tokens[0] = load_early(tile.tokens + place + group);
      tokens[1] = load_early(tile.tokens + place + group + 8);
    }
    if (__ballot_sync(0xffffffffu, tokens[0] >= 0) == 0) return;
    add_rows(tile, tokens, b, first);
  }
}

}  // namespace kiln
