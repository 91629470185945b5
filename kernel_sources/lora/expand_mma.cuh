// lora_expand for bf16 and fp16, on tensor cores. The rows of an mma are tokens, and its columns
// are columns of out. h is float32, and an mma takes numbers of T: each element of h is split into
// the sum of two numbers of T, which keeps at least 16 bits of it.
#pragma once
#include "kiln/math/reduce.cuh"
#include "kiln/ptx/async.cuh"
#include "kiln/ptx/mma.cuh"
#include "lora/expand_fma.cuh"

namespace kiln {

constexpr int kRanks = 16, kRows = 16;  // of an mma: ranks, and tokens
constexpr int kPitch = kWarpColumns + 8;  // odd in 16-byte chunks: ldmatrix reads distinct banks
constexpr int kEights = kWarpColumns / 8;

// A warp's copy of B in shared memory: 16 ranks of its columns.
template <class T> struct alignas(16) Staged { T rows[kRanks][kPitch]; };

template <class T> constexpr bool kNarrow = false;  // whether its range is smaller than float32's
template <> constexpr bool kNarrow<fp16> = true;

template <class T> KILN_FN float low_half(uint32_t pair) { return to_float(T{uint16_t(pair)}); }
template <class T> KILN_FN float high_half(uint32_t pair) {
  return to_float(T{uint16_t(pair >> 16)});
}

// Copy 16 ranks of B, from rank `start` on, to shared memory, for this warp's columns. Ranks and
// columns that do not exist become zeros.
template <class T>
KILN_FN void stage_ranks(Staged<T>& staged, const Tile<T>& tile, int start, int first) {
  const int lane = threadIdx.x % 32;
  const bool aligned = tile.size % 8 == 0 && reinterpret_cast<uint64_t>(tile.b) % 16 == 0;
  if (aligned) {
#pragma unroll
    for (int i = lane; i < kRanks * kEights; i += 32) {
      const int k = i / kEights, o = i % kEights * 8;
      const bool valid = start + k < tile.rank && first + o < tile.size;
      const T* from = tile.b + (valid ? int64_t(start + k) * tile.size + first + o : 0);
      copy_async_16(&staged.rows[k][o], from, valid);
    }
  } else {
    for (int i = lane; i < kRanks * kWarpColumns; i += 32) {
      const int k = i / kWarpColumns, o = i % kWarpColumns;
      const bool valid = start + k < tile.rank && first + o < tile.size;
      staged.rows[k][o] = valid ? tile.b[int64_t(start + k) * tile.size + first + o] : T{};
    }
  }
  copy_commit();
}

// The range of fp16 is smaller than float32's. So before a token's h is split it is multiplied by
// `by`, the power of two that brings its largest element between 1 and 2. The sums are multiplied
// by `back`, which is 1 / by.
struct RowScale { float by, back; };
template <class T> KILN_FN RowScale scale_of_row(const Tile<T>& tile, int token) {
  const float* h = tile.h + max(token, 0) * tile.h_stride;
  float most = 0;
#pragma unroll 1
  for (int k = int(threadIdx.x) % 4; k < tile.rank; k += 4)
    if (token >= 0) most = fmaxf(most, fabsf(h[k]));
  __syncwarp();
  const uint32_t exponent = as_uint(quad_max(most)) >> 23;
  if (exponent == 0 || exponent > 253) return {1.0f, 1.0f};
  return {as_float((254 - exponent) << 23), as_float(exponent << 23)};
}

// Load the elements `start` and `start` + 1 of a token's h. Split each into two numbers of T, whose
// sum it is: one goes to `high`, the other to `low`.
template <class T>
KILN_FN void pairs_of_h(const Tile<T>& tile, int token, int start, RowScale scale, uint32_t& high,
                        uint32_t& low) {
  const float* h = tile.h + max(token, 0) * tile.h_stride + start;
  float a = token >= 0 && start < tile.rank ? h[0] : 0.0f;
  float b = token >= 0 && start + 1 < tile.rank ? h[1] : 0.0f;
  if constexpr (kNarrow<T>) a = mul_rn(a, scale.by), b = mul_rn(b, scale.by);
  high = pack<T>(a, b);
  low = pack<T>(a - low_half<T>(high), b - high_half<T>(high));
}

// Load two neighbouring columns of a row of out. If only one column is left in the part, the other
// one is 0.
template <class T>
KILN_FN uint32_t load_pair(const T* row, int left, bool aligned) {
  if (aligned) return load_vector<uint32_t>(row);
  return (left > 0 ? row[0].bits : 0u) | (left > 1 ? uint32_t(row[1].bits) << 16 : 0u);
}

// Add the adapter's part to this warp's columns, from `first` on, for all tokens of a tile. It
// calls pdl_wait before it reads h and out.
template <class T> KILN_FN void add_tile(const Tile<T>& tile, int first) {
  __shared__ Staged<T> all[8];  // by warp
  auto& staged = all[threadIdx.x / 32];
  const int lane = threadIdx.x % 32, group = lane / 4, pair = lane % 4 * 2;
  const bool even = tile.size % 2 == 0 && tile.out_stride % 2 == 0 &&
                    reinterpret_cast<uint64_t>(tile.out) % 4 == 0;
  int ready = 0;  // the first of the ranks in shared memory
  stage_ranks(staged, tile, 0, first);
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
    uint32_t y[2][kEights];
    float sum[kEights][4] = {};
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const int o = first + n * 8 + pair;
        y[j][n] = 0;
        if (tokens[j] >= 0 && o < tile.size)
          y[j][n] = load_pair(tile.out + tokens[j] * tile.out_stride + o, tile.size - o, even);
      }
    RowScale scale[2];
    if constexpr (kNarrow<T>)
      for (int j = 0; j < 2; ++j) scale[j] = scale_of_row(tile, tokens[j]);
    for (int start = 0; start < tile.rank; start += kRanks) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        pairs_of_h(tile, tokens[i % 2], start + pair + i / 2 * 8, scale[i % 2], high[i], low[i]);
      if (start != ready) {
        __syncwarp();  // all lanes have read the previous ranks
        stage_ranks(staged, tile, start, first);
        ready = start;
      }
      copy_wait<0>();
      __syncwarp();
#pragma unroll
      for (int n = 0; n < kEights; n += 2) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, &staged.rows[lane % 16][(n + lane / 16) * 8]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_m16n8k16<T>(sum[n + i], high, b[2 * i], b[2 * i + 1]);
          mma_m16n8k16<T>(sum[n + i], low, b[2 * i], b[2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int n = 0; n < kEights; ++n) {
        const int o = first + n * 8 + pair;
        if (tokens[j] < 0 || o >= tile.size) continue;
        if constexpr (kNarrow<T>)
          for (int i = 2 * j; i < 2 * j + 2; ++i) sum[n][i] = mul_rn(sum[n][i], scale[j].back);
        T* row = tile.out + tokens[j] * tile.out_stride + o;
        const uint32_t sums =
            pack<T>(add_rn(low_half<T>(y[j][n]), mul_rn(sum[n][2 * j], tile.scale)),
                    add_rn(high_half<T>(y[j][n]), mul_rn(sum[n][2 * j + 1], tile.scale)));
        if (even) {
          store_vector(row, sums);
          continue;
        }
        row[0] = T{uint16_t(sums)};
        if (o + 1 < tile.size) row[1] = T{uint16_t(sums >> 16)};
      }
  }
}

}  // namespace kiln
