// Online softmax over tiles of keys, in the accumulator layout of mma. Of each 16 rows, s[m] and
// o[m], a lane holds parts of two: s[m][.][2 * j ..] and o[m][.][2 * j ..] for j = 0 and 1.
#pragma once
#include "kiln/attention/logits.cuh"

namespace kiln {

constexpr float kSlack = 8;  // log2 units: weights up to 2^8 stay exact, few tiles rescale

// s = cap tanh(scale s / cap), in log2 units.
template <int M, int N> KILN_FN void cap_logits(float (&s)[M][N][4], float cap, float scale) {
  const float twice = 2 * kLog2e * scale / cap;
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][n][j] = capped(s[m][n][j] * twice, cap * kLog2e);
}

// Mask the keys outside [begin, end), counted from this lane's first key. j: which of the lane's two
// rows.
template <int N> KILN_FN void mask_keys(float (&s)[N][4], int j, int begin, int end) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (n * 8 + i >= end || n * 8 + i < begin) s[n][2 * j + i] = minus_infinity();
}

// Online softmax update of top and sum: top rises only if a logit exceeds it by the slack. Returns
// whether any lane must rescale o by the factors f. A row's top depends on that row alone.
template <class T, int N>
KILN_FN bool update_row_max(const float (&s)[N][4], float (&top)[2], float (&sum)[2], float (&f)[2],
                            float scale) {
  float best[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    best[j] = minus_infinity();
#pragma unroll
    for (int n = 0; n < N; ++n) best[j] = fmaxf(best[j], fmaxf(s[n][2 * j], s[n][2 * j + 1]));
    best[j] = fmaxf(top[j], quad_max(best[j]) * scale - kLift<T>);
  }
  const bool rose[2] = {best[0] > top[0] + kSlack, best[1] > top[1] + kSlack};
  if (!__any_sync(0xffffffffu, rose[0] || rose[1])) return false;
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    f[j] = rose[j] ? exp2_fast(top[j] - best[j]) : 1.0f;
    top[j] = rose[j] ? best[j] : top[j];
    sum[j] *= f[j];
  }
  return true;
}
// Replace logits by weights s = 2^(s * scale - top), and add them to sum.
template <int N>
KILN_FN void exp_and_sum(float (&s)[N][4], const float (&top)[2], float (&sum)[2], float scale) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float down = -finite(top[j]);
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int i = 2 * j; i < 2 * j + 2; ++i) {
        s[n][i] = exp2_fast(fma_rn(s[n][i], scale, down));
        sum[j] += s[n][i];
      }
  }
}
template <int C> KILN_FN void rescale(float (&o)[C][4], const float (&f)[2]) {
#pragma unroll
  for (int c = 0; c < C; ++c) o[c][0] *= f[0], o[c][1] *= f[0], o[c][2] *= f[1], o[c][3] *= f[1];
}

}  // namespace kiln
