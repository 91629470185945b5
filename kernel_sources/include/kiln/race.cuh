// The race that draws a token: over a list, or over a row without most of its noise.
#pragma once
#include "kiln/shortlist.cuh"

namespace kiln {

// Over the first n of the sorted list whose logit is at least the cutoff.
KILN_FN uint64_t race_of_list(int n, const Noise& noise, const Weights& weights, float cutoff,
                              const SamplerShared& s) {
  uint64_t first = Min::kIdentity;
#pragma unroll 1
  for (int j = threadIdx.x; j < n; j += blockDim.x) {
    const float x = value_of_entry(s.sorted[j]);
    if (x >= cutoff)
      first = Min()(first, arrival_of(noise, token_of_entry(s.sorted[j]), weights(x)));
  }
  return first;
}

constexpr float kSlack = 1.001f;  // more than all roundings below together

// No later than this does a token arrive, by the upper 16 of its bits: -log(1 - u) <= u / (1 - u).
KILN_FN float latest(uint32_t upper, float weight) {
  return kSlack * float(upper + 1) / (float(65535 - upper) * weight);
}

// Any 16 bits of four that are 0, once `mask` is applied.
KILN_FN bool has_zero(uint64_t x, uint32_t mask) {
  const uint32_t a = uint32_t(x) & mask, b = uint32_t(x >> 32) & mask;
  return (((a - 0x00010001u) & ~a) | ((b - 0x00010001u) & ~b)) & 0x80008000u;
}

// Over all tokens of a row whose logit is at least the cutoff; `top` is one of them. A token
// cannot win where u alone, by its upper bits, is later than somebody's certain arrival.
template <class T>
KILN_NOINLINE uint64_t race_of_row(const Row<T>& row, int top, const Noise& noise,
                                   const Weights& weights, float cutoff, SamplerShared& s) {
  float bound = latest(uint32_t(noise.upper(top / 4) >> 16 * (top % 4)) & 0xffff, 1.0f);
  if (int(threadIdx.x) < row.num_units()) {
    row.each_of(threadIdx.x, [&](int token, float x) {
      const uint32_t upper = uint32_t(noise.upper(token / 4) >> 16 * (token % 4)) & 0xffff;
      if (x >= cutoff) bound = fminf(bound, latest(upper, weights(x)));
    });
  }
  bound = as_float(uint32_t(reduce<Min>(as_uint(bound), s.partial)));
  uint64_t first = Min::kIdentity;
  auto run = [&](int token, float x) {
    if (!(x >= cutoff)) return;
    first = Min()(first, arrival_of(noise, token, weights(x)));
    bound = fminf(bound, as_float(uint32_t(first >> 32)));
  };
  row.each_unit([&](int u, const float (&x)[kUnit]) {
    const float m = largest(x);
    if (!(m >= cutoff)) return;
    const float may = kSlack * bound * weights(m) * 65536.0f;  // upper bits below this may win
    const int bits = may <= 1.0f ? 0 : may > 32768.0f ? 16 : int((as_uint(may) - 1) >> 23) - 126;
    const uint32_t half = 0xffffu << bits & 0xffff, mask = half * 0x10001u;
    const uint64_t left = noise.upper(2 * u), right = noise.upper(2 * u + 1);
    if (!has_zero(left, mask) && !has_zero(right, mask)) return;
    row.each_of(u, [&](int token, float y) {
      const uint64_t upper = (token % kUnit < 4 ? left : right) >> 16 * (token % 4);
      if (!(upper & half)) run(token, y);
    });
  });
  row.each_edit(run);
  return first;
}

}  // namespace kiln
