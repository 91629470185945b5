// Attention of one warp: up to 16 rows by 32 keys at a time, S' = K Q', then O' += V' P'.
//
// Keys and head dimensions are the mma's M side (16), rows its N side (8). So a group of up to
// eight heads costs half of a 16-row tile. In accumulators, with g = lane / 4 and t = lane % 4, a
// lane holds keys g and g + 8 of each block and rows 2t and 2t + 1 of each group of 8 rows.
#pragma once
#include "attention_decode/merge.cuh"
#include "kiln/attention/split.cuh"
#include "kiln/ptx/fp8.cuh"

namespace kiln {

constexpr float kSlack = 8;  // log2 units: weights up to 2^8 stay exact, and rescaling is rare

// Operand type of the mma: one-byte KV is unpacked to fp16, one instruction for each pair.
template <class T, class KV> struct Factors { using Type = T; };
template <class T> struct Factors<T, e4m3> { using Type = fp16; };

// N: groups of 8 rows. logit[block][..][4]: key g for rows 2t and 2t + 1, then key g + 8.
template <int N> using Logits = float[kPairBlocks][N][4];

// Online softmax state of 8 N rows; o is relative to 2^top.
template <class T, int D, int N> struct AttentionRows {
  static constexpr int kSteps = D / 16;
  static constexpr uint32_t kWarp = 0xffffffffu;
  float o[kSteps][N][4];  // [16 dimensions][8 rows]: dimension g rows 2t, 2t + 1, then g + 8
  float top[N][2], sum[N][2];

  KILN_FN void clear() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      top[n][0] = top[n][1] = minus_infinity(), sum[n][0] = sum[n][1] = 0.0f;
#pragma unroll
      for (int c = 0; c < kSteps; ++c)
        o[c][n][0] = o[c][n][1] = o[c][n][2] = o[c][n][3] = 0.0f;
    }
  }

  // Call after the last key: reduces `sum` over the lanes that share a row.
  KILN_FN void end() {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) sum[n][j] = over_keys_sum(sum[n][j]);
  }
  // Merge the state of the keys that follow. end() must have run on both states.
  KILN_FN void merge(const AttentionRows& next) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const MergeFactors f = MergeFactors::update_top(top[n][j], next.top[n][j]);
        sum[n][j] = f(sum[n][j], next.sum[n][j]);
#pragma unroll
        for (int c = 0; c < kSteps; ++c) {
          o[c][n][j] = f(o[c][n][j], next.o[c][n][j]);
          o[c][n][j + 2] = f(o[c][n][j + 2], next.o[c][n][j + 2]);
        }
      }
  }

  // Reductions over the lanes that share a row.
  KILN_FN static float over_keys_max(float x) {
    for (int m = 4; m < 32; m *= 2) x = fmaxf(x, __shfl_xor_sync(kWarp, x, m));
    return x;
  }
  KILN_FN static float over_keys_sum(float x) {
    for (int m = 4; m < 32; m *= 2) x += __shfl_xor_sync(kWarp, x, m);
    return x;
  }

  // Online softmax update: replaces logits (log2 units) by weights 2^(logit - top). top rises only
  // when a logit exceeds it by the slack, so most keys need no reduction across lanes. It depends
  // on the row's own keys alone.
  KILN_FN void online_softmax_update(Logits<N>& s) {
    float best[N][2];
    bool rises = false;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        best[n][j] = fmaxf(fmaxf(s[0][n][j], s[0][n][j + 2]), fmaxf(s[1][n][j], s[1][n][j + 2]));
        rises |= best[n][j] > top[n][j] + (kSlack + kLift<T>);
      }
    if (__any_sync(kWarp, rises)) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          // The condition is the one above, also when rounded: else other rows would matter.
          best[n][j] = over_keys_max(best[n][j]);
          const bool own = best[n][j] > top[n][j] + (kSlack + kLift<T>);
          best[n][j] = own ? best[n][j] - kLift<T> : top[n][j];
          const float f = exp2_fast(top[n][j] - finite(best[n][j]));
          top[n][j] = best[n][j];
          sum[n][j] *= f;
#pragma unroll
          for (int c = 0; c < kSteps; ++c) o[c][n][j] *= f, o[c][n][j + 2] *= f;
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float zero = finite(top[n][j]);
#pragma unroll
        for (int m = 0; m < kPairBlocks; ++m)
#pragma unroll
          for (int i = j; i < 4; i += 2) {
            s[m][n][i] = exp2_fast(s[m][n][i] - zero);
            sum[n][j] += s[m][n][i];
          }
      }
  }

  // Convert the weights of one KV block to the mma's B operand.
  KILN_FN static void weights(uint32_t (&p)[N][2], const float (&s)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      p[n][0] = transpose_8x8(pack<T>(s[n][0], s[n][1]));
      p[n][1] = transpose_8x8(pack<T>(s[n][2], s[n][3]));
    }
  }
};

template <class T, class KV, int D> struct AttentionTile {
  using Factor = typename Factors<T, KV>::Type;
  static constexpr bool kWide = sizeof(KV) == 1;            // 16 bytes hold 16 elements, not 8
  static constexpr bool kLong = kWide && kLongUnpack;       // unpacking takes much code
  static constexpr int kChunks = D * int(sizeof(KV)) / 16;  // 16-byte chunks of a row of K or V
  // The row pitch is an odd number of 16-byte chunks, so the eight rows that ldmatrix reads at once
  // fall in different banks.
  static constexpr int kStep = (kChunks | 1) * 16, kBytes = kPairBlocks * kKVBlock * kStep;
  static constexpr int kQueryStep = (D / 8 | 1) * 16;  // bytes between rows of the queries
  static constexpr int kPitch = D + 4;  // floats per row of a result: rows 2t are 8 banks apart
  static constexpr int kSteps = D / 16;

  // Query operand of 8 N rows: kept in registers if it fits, else read from shared memory each
  // time. With one-byte KV a lane holds dimensions 4t .. 4t + 3, the order in which ldmatrix yields
  // the keys.
  template <int N> struct Queries {
    static constexpr bool kKept = D * N <= (kLong ? 64 : 128);
    uint32_t kept[kKept ? kSteps : 1][N][2];

    KILN_FN static void read(uint32_t (&b)[2], const unsigned char* rows, int k, int n, int lane) {
      const unsigned char* row = rows + (n * 8 + lane / 4) * kQueryStep + k * 32 + lane % 4 * 4;
      if constexpr (kWide) {
        const Words2 pair = load_vector<Words2>(row + lane % 4 * 4);
        b[0] = pair.x, b[1] = pair.y;
      } else {
        b[0] = load_vector<uint32_t>(row), b[1] = load_vector<uint32_t>(row + 16);
      }
    }
    KILN_FN void keep(const unsigned char* rows, int lane) {
      if constexpr (!kKept) return;
#pragma unroll
      for (int k = 0; k < kSteps; k += kWide ? 1 : 2)
#pragma unroll
        for (int n = 0; n < N; ++n) {
          if constexpr (kWide) {
            read(kept[k][n], rows, k, n, lane);
          } else {
            uint32_t two[4];
            ldmatrix_x4(two, rows + (n * 8 + lane % 8) * kQueryStep + (2 * k + lane / 8) * 16);
            kept[k][n][0] = two[0], kept[k][n][1] = two[1];
            kept[k + 1][n][0] = two[2], kept[k + 1][n][1] = two[3];
          }
        }
    }
    KILN_FN void get(uint32_t (&b)[2], const unsigned char* rows, int k, int n, int lane) const {
      if constexpr (kKept) b[0] = kept[k][n][0], b[1] = kept[k][n][1];
      else read(b, rows, k, n, lane);
    }
  };

  // Row address for ldmatrix, one-byte KV: 16 keys by two 16-byte chunks, into r[2 * chunk + half].
  KILN_FN static const unsigned char* wide_row(const unsigned char* block, int chunk, int lane) {
    return block + lane % 16 * kStep + min(chunk + lane / 16, kChunks - 1) * 16;
  }

  // s += K Q' for a pair of KV blocks.
  template <int N>
  KILN_FN static void multiply_keys(Logits<N>& s, const Queries<N>& queries,
                                    const unsigned char* rows, const unsigned char* keys,
                                    int lane) {
    uint32_t raw[kPairBlocks][4], a[4], b[N][2];
#pragma unroll (Queries<N>::kKept ? kSteps : 1)
    for (int pair = 0; pair < kSteps; pair += 2) {
      if constexpr (kWide)
#pragma unroll
        for (int m = 0; m < kPairBlocks; ++m)
          ldmatrix_x4(raw[m], wide_row(keys + m * kKVBlock * kStep, pair, lane));
#pragma unroll
      for (int k = pair; k < pair + 2; ++k) {
        if (kSteps % 2 && k == kSteps) break;
#pragma unroll
        for (int n = 0; n < N; ++n) queries.get(b[n], rows, k, n, lane);
#pragma unroll
        for (int m = 0; m < kPairBlocks; ++m) {
          const unsigned char* block = keys + m * kKVBlock * kStep;
          if constexpr (kWide) {
            unpack_e4m3<Factor>(raw[m][(k - pair) * 2], a[0], a[2]);
            unpack_e4m3<Factor>(raw[m][(k - pair) * 2 + 1], a[1], a[3]);
          } else {
            ldmatrix_x4(a, block + lane % 16 * kStep + (2 * k + lane / 16) * 16);
          }
#pragma unroll
          for (int n = 0; n < N; ++n) mma_m16n8k16<Factor>(s[m][n], a, b[n][0], b[n][1]);
        }
      }
    }
  }

  // o += V' P' for one KV block. o[c] holds 16 dimensions: a lane has g and g + 8, or with one-byte
  // KV 2g and 2g + 1.
  template <int N>
  KILN_FN static void add_values(float (&o)[kSteps][N][4], const uint32_t (&p)[N][2],
                                 const unsigned char* block, int lane) {
    uint32_t raw[4], a[4];
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      if constexpr (kWide) {
        if (c % 2 == 0) ldmatrix_x4_trans(raw, wide_row(block, c, lane));
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // 2 keys x 2 dimensions: sort by dimension
          const uint32_t sorted = swap_middle_bytes(raw[c % 2 * 2 + half]);
          unpack_e4m3<Factor>(sorted, a[2 * half], a[2 * half + 1]);
        }
      } else {
        const int key = lane % 8 + lane / 16 * 8;
        ldmatrix_x4_trans(a, block + key * kStep + (2 * c + lane / 8 % 2) * 16);
      }
#pragma unroll
      for (int n = 0; n < N; ++n) mma_m16n8k16<Factor>(o[c][n], a, p[n][0], p[n][1]);
    }
  }

  // Store the first num_rows rows of a warp's result to shared memory, [rows][kPitch] floats.
  template <int N>
  KILN_FN static void store_rows(float* to, const float (&o)[kSteps][N][4], int num_rows,
                                 int lane) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = n * 8 + lane % 4 * 2 + j;
        if (row >= num_rows) continue;
#pragma unroll
        for (int c = 0; c < kSteps; ++c) {
          float* at = to + row * kPitch + c * 16 + lane / 4 * (kWide ? 2 : 1);
          at[0] = o[c][n][j];
          at[kWide ? 1 : 8] = o[c][n][j + 2];
        }
      }
  }
};

}  // namespace kiln
