// A tile of 16 keys or values of D elements in shared memory, times a tile of 16 rows, by a warp.
#pragma once
#include "kiln/attention_merge.cuh"
#include "kiln/attention_split.cuh"
#include "kiln/ptx_fp8.cuh"

namespace kiln {

struct alignas(8) Float2 { float x, y; };

template <class T, class KV, int D> struct AttentionTile {
  static constexpr bool kWide = sizeof(KV) == 1;            // 16 bytes hold 16 elements, not 8
  static constexpr int kChunks = D * int(sizeof(KV)) / 16;  // 16-byte chunks of a row of K or V
  // Rows of shared memory lie an odd number of chunks apart: the eight that ldmatrix reads at once
  // are in different banks.
  static constexpr int kStep = (kChunks | 1) * 16, kBytes = kKVBlock * kStep;
  static constexpr int kQueryStep = (D / 8 | 1) * 16;  // bytes from row to row of the queries
  static constexpr int kPitch = D + 8;                 // floats from row to row of a result
  static constexpr int kSteps = D / 16;
  static constexpr bool kKeepQuery = D <= (kWide ? 64 : 128);  // in registers, or read each time

  // The fragment of 16 dimensions of the queries. With KV of one byte a lane's dimensions are
  // 4t .. 4t + 3, as ldmatrix yields them of the keys: a sum does not mind the order.
  KILN_FN static void load_query(uint32_t (&a)[4], const unsigned char* queries, int k, int lane) {
    if constexpr (kWide) {
      const unsigned char* at = queries + lane / 4 * kQueryStep + k * 32 + lane % 4 * 8;
      const Words2 low = load_vector<Words2>(at);
      const Words2 high = load_vector<Words2>(at + 8 * kQueryStep);
      a[0] = low.x, a[1] = high.x, a[2] = low.y, a[3] = high.y;
    } else {
      ldmatrix_x4(a, queries + lane % 16 * kQueryStep + (2 * k + lane / 16) * 16);
    }
  }

  // Two chunks of 16 one-byte elements of all keys: r[2 * chunk + half of the keys].
  KILN_FN static const unsigned char* wide_row(const unsigned char* tile, int chunk, int lane) {
    return tile + lane % 16 * kStep + min(chunk + lane / 16, kChunks - 1) * 16;
  }

  // logit[keys 0-7, 8-15] = queries times a tile of keys.
  KILN_FN static void multiply_keys(float (&logit)[2][4], const uint32_t (&kept)[kSteps][4],
                                    const unsigned char* queries, const unsigned char* tile,
                                    int lane) {
    uint32_t raw[4], b[4], a[4];
#pragma unroll (kKeepQuery ? kSteps : 1)
    for (int pair = 0; pair < kSteps; pair += 2) {
      if constexpr (kWide) ldmatrix_x4(raw, wide_row(tile, pair, lane));
#pragma unroll
      for (int k = pair; k < pair + 2; ++k) {
        if (kSteps % 2 && k == kSteps) break;
        if constexpr (kWide) {
          unpack_e4m3<T>(raw[(k - pair) * 2], b[0], b[1]);
          unpack_e4m3<T>(raw[(k - pair) * 2 + 1], b[2], b[3]);
        } else {
          ldmatrix_x4(b, tile + (lane % 8 + lane / 16 * 8) * kStep + (2 * k + lane / 8 % 2) * 16);
        }
        if constexpr (kKeepQuery) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = kept[k][i];
        } else {
          load_query(a, queries, k, lane);
        }
        mma_m16n8k16<T>(logit[0], a, b[0], b[1]);
        mma_m16n8k16<T>(logit[1], a, b[2], b[3]);
      }
    }
  }

  // o += p times a tile of values. o[n] holds 8 dimensions: 8n .., or with KV of one byte the even
  // (n even) or odd (n odd) ones of the 16 from 16 * (n / 2) on.
  KILN_FN static void add_values(float (&o)[D / 8][4], const uint32_t (&p)[4],
                                 const unsigned char* tile, int lane) {
    uint32_t raw[4], b[4];
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if constexpr (kWide) {
        if (c % 2 == 0) ldmatrix_x4_trans(raw, wide_row(tile, c, lane));
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // of two keys and two dimensions: sort by dimension
          const uint32_t x = raw[c % 2 * 2 + half];
          const uint32_t sorted = (x & 0xff0000ff) | (x >> 8 & 0xff00) | (x << 8 & 0xff0000);
          unpack_e4m3<T>(sorted, b[half], b[2 + half]);
        }
      } else {
        ldmatrix_x4_trans(b, tile + lane % 16 * kStep + (2 * c + lane / 16) * 16);
      }
      mma_m16n8k16<T>(o[2 * c], p, b[0], b[1]);
      mma_m16n8k16<T>(o[2 * c + 1], p, b[2], b[3]);
    }
  }

  // Move the first rows of a warp's result to shared memory, [kRows][kPitch].
  KILN_FN static void spread(float* to, const float (&o)[D / 8][4], int num_rows,
                             int lane) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (lane / 4 + 8 * j >= num_rows) continue;
      float* row = to + (lane / 4 + 8 * j) * kPitch;
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
        const float *u = o[2 * c] + 2 * j, *w = o[2 * c + 1] + 2 * j;
        if constexpr (kWide) {
          store_vector(row + c * 16 + lane % 4 * 4, Float4{u[0], w[0], u[1], w[1]});
        } else {
          store_vector(row + c * 16 + lane % 4 * 2, Float2{u[0], u[1]});
          store_vector(row + c * 16 + 8 + lane % 4 * 2, Float2{w[0], w[1]});
        }
      }
    }
  }
};

}  // namespace kiln
