// The arithmetic of a draw: weights, masses, and the clocks of a race, with the same bits on every
// GPU, on the host and in torch (jit_kernels/sampling_reference.py).
#pragma once
#include "kiln/ptx.cuh"

namespace kiln {

// Keys order as the numbers do; -0 equals +0.
KILN_FN uint32_t key_of(float x) {
  const uint32_t u = as_uint(add_rn(x, 0.0f));
  return u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
}
KILN_FN float value_of(uint32_t key) {
  return as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

// A logit and its token as one number: larger for a larger logit, among equals for a lower token.
KILN_FN uint64_t entry_of(float x, int token) { return uint64_t(key_of(x)) << 32 | uint32_t(~token); }
KILN_FN float value_of_entry(uint64_t entry) { return value_of(uint32_t(entry >> 32)); }
KILN_FN int token_of_entry(uint64_t entry) { return int(~uint32_t(entry)); }

// 2^(d * scale) for d <= 0: exactly 1 at 0, nowhere below 2^-99, off by 1.1e-7 and the rounding of
// the exponent. The exponent less 1 is a multiple of 2^-23, so that the sums and products below are
// exact in a float64 before they are rounded: torch has no fused multiply-add of its own.
KILN_FN float weight_of(float d, float scale) {
  float y = sub_rn(mul_rn(d, scale), 1.0f);
  y = y > -100.0f ? y : -100.0f;
  const float shifted = add_rn(y, 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const float f = sub_rn(y, sub_rn(shifted, 12582912.0f));
  float p = 2.652945462614298e-3f;
  p = fma_rn(p, f, 1.9343025982379913e-2f);
  p = fma_rn(p, f, 1.1101467162370682e-1f);
  p = fma_rn(p, f, 4.8044484853744507e-1f);
  p = fma_rn(p, f, 1.3862940073013306f);
  p = fma_rn(p, f, 2.0f);
  return as_float(as_uint(p) + (as_uint(shifted) << 23));
}

// A weight as an integer: sums of these are exact, and so have no order.
KILN_FN uint64_t mass_of(float weight) { return uint64_t(mul_rn(weight, 0x1p40f)); }

// SplitMix64: the output of a state. Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", 2014.
constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;
KILN_FN uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// The random numbers of one row: a function of its seed and position, and of a token's id.
// Of the 52 bits of a token four tokens share one output for the upper 16: they alone nearly
// always tell that a token loses its race.
struct Noise {
  uint64_t coarse, fine;
  KILN_FN Noise(int64_t seed, int64_t position) {
    coarse = mix(mix(uint64_t(seed) + kGamma) + uint64_t(position) + kGamma);
    fine = ~coarse;
  }
  // The upper bits of tokens 4 * group .. 4 * group + 3, the first the lowest 16.
  KILN_FN uint64_t upper(int group) const { return mix(coarse + kGamma * uint64_t(group + 1)); }
  KILN_FN uint64_t bits(int token) const {
    const uint64_t first = upper(token / 4) >> 16 * (token % 4) & 0xffff;
    return first << 36 | mix(fine + kGamma * uint64_t(token + 1)) >> 28;
  }
};

// -log(1 - u) with u = (bits + 1/2) / 2^52: an exponential variate, accurate near 0 where races are
// won. Products and sums are rounded one by one.
KILN_FN float exponential(uint64_t bits) {
  const uint64_t odd = 2 * bits + 1;  // u * 2^53
  float numerator, denominator, whole = 0.0f;
  if (odd < 1ull << 51) {
    const float u = mul_rn(float(odd), 0x1p-53f);
    numerator = -u;
    denominator = sub_rn(2.0f, u);
  } else {
    const uint32_t v = as_uint(mul_rn(float((1ull << 53) - odd), 0x1p-53f));
    const int e = int(v - 0x3f3504f3u) >> 23;  // v = m * 2^e with m from 0.707 to 1.414
    const float m = as_float(v - (uint32_t(e) << 23));
    numerator = sub_rn(m, 1.0f);
    denominator = add_rn(m, 1.0f);
    whole = mul_rn(float(e), 0.69314718f);
  }
  const float z = div_rn(numerator, denominator), s = mul_rn(z, z);
  float p = 2.2222222e-1f;  // log m = 2 atanh z
  p = add_rn(mul_rn(p, s), 2.8571429e-1f);
  p = add_rn(mul_rn(p, s), 4.0e-1f);
  p = add_rn(mul_rn(p, s), 6.6666667e-1f);
  p = add_rn(mul_rn(p, s), 2.0f);
  return -add_rn(whole, mul_rn(z, p));
}

// When a token arrives: the first of all is drawn, with a probability proportional to its weight.
// As one number with the token, which decides between equal times.
KILN_NOINLINE uint64_t arrival_of(const Noise& noise, int token, float weight) {
  const float time = div_rn(exponential(noise.bits(token)), weight);
  return uint64_t(as_uint(time)) << 32 | uint32_t(token);
}

}  // namespace kiln
