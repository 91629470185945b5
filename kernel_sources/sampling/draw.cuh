// Arithmetic of a draw: weights, masses, and the clocks of a race. Its bits are the same on every
// GPU, on the host and in torch (jit_kernels/ops/sampling/noise.py).
#pragma once
#include "kiln/math/order.cuh"

namespace kiln {

// A logit and its token as one number: larger for a larger logit, and for equal logits a lower
// token.
KILN_FN uint64_t entry_of(float x, int token) {
  return uint64_t(key_of(x)) << 32 | uint32_t(~token);
}
KILN_FN float value_of_entry(uint64_t entry) { return value_of(uint32_t(entry >> 32)); }
KILN_FN int token_of_entry(uint64_t entry) { return int(~uint32_t(entry)); }

// 2^(d * scale) for d <= 0, within 2.5e-7: exactly 1 at 0, and 2^-100 below `lowest` = -100 /
// scale. g is a multiple of 2^-22 between 2.5 and 3.5, so sums and products below are exact in
// float64 before they are rounded. torch relies on that, as it has no fused multiply-add.
KILN_FN float weight_of(float d, float scale, float lowest) {
  d = fmaxf(d, lowest);
  const float shifted = fma_rn(d, scale, 12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const float g = fma_rn(d, scale, sub_rn(12582915.0f, shifted));
  float p = 1.326472731307149e-3f;
  p = fma_rn(p, g, -1.0225578211247921e-2f);
  p = fma_rn(p, g, 5.8831728994846344e-2f);
  p = fma_rn(p, g, -9.522955864667892e-2f);
  p = fma_rn(p, g, 2.432086318731308e-1f);
  p = fma_rn(p, g, 4.492241516709328e-2f);
  return as_float(as_uint(p) + (as_uint(shifted) << 23));
}

// A weight in fixed point. Sums of integers do not depend on the order.
KILN_FN uint64_t mass_of(float weight) { return uint64_t(mul_rn(weight, 0x1p40f)); }

// The output function of SplitMix64. Steele, Lea, Flood, "Fast splittable pseudorandom number
// generators", 2014.
constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;
KILN_FN uint64_t mix(uint64_t z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

// Which bytes of x are 0: one bit per byte, the lowest first.
KILN_FN uint32_t zero_bytes(uint64_t x) {
  constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7fu;
  const uint64_t high = ~(((x & kLow) + kLow) | x | kLow);
  return uint32_t(high * 0x0002040810204081u >> 56);
}

// Random numbers of a row, from its seed and position, and a token's id. A token's number u is low
// if u < 2^-8. One generator output tells the first of 32 tokens with a low number, or usually that
// none has one. For each token after the first, a byte of another output tells whether its number
// is low. An output of the token's own gives the rest of u.
constexpr int kGroup = 32;
// The largest output that means that none of a group's first k tokens has a low number.
KILN_FN constexpr uint32_t none_low_of(int k) {
  if (k == 0) return ~0u;
  uint32_t bound = 0xff000000u;
#pragma unroll 1
  for (int i = 1; i < k; ++i) bound -= bound >> 8;
  return bound - 1;
}
constexpr uint32_t kNoneLow = none_low_of(kGroup);
using NoneLow = uint32_t[kGroup + 1];  // none_low_of(k) for each k
struct Noise {
  uint64_t row;
  KILN_FN static Noise of(int64_t seed, int64_t position) {
    return {mix(mix(uint64_t(seed) + kGamma) + uint64_t(position) + kGamma)};
  }
  KILN_FN uint32_t group(int g) const {
    return uint32_t(mix(row + kGamma * uint64_t(g + 1)) >> 32);
  }
  // One byte each for tokens 8 * unit .. 8 * unit + 7, the lowest byte first.
  KILN_FN uint64_t bytes(int unit) const {
    return mix(row + (kGamma << 32) + kGamma * uint64_t(unit + 1));
  }
  KILN_FN uint64_t bits(int token, bool low) const {
    const uint64_t own = mix(~row + kGamma * uint64_t(token + 1));
    return low ? own >> 20 : (1ull << 44) + ((own >> 12) * 255 >> 8);
  }
};

// Tokens 32 * g .. 32 * g + 31 with a low number, one bit each; `first` is the first of them.
KILN_FN uint32_t lows_from(Noise noise, int g, int first) {
  uint32_t low = 0;
#pragma unroll 1
  for (int i = 0; i < kGroup / 8; ++i) low |= zero_bytes(noise.bytes(kGroup / 8 * g + i)) << 8 * i;
  return (low & ~1u << first) | 1u << first;
}

// Whether a token's number is low.
KILN_FN bool is_low(Noise noise, int token, const NoneLow& none_low) {
  const uint32_t of_all = noise.group(token / kGroup);
  if (of_all <= none_low[token % kGroup + 1]) return false;
  if (of_all <= none_low[token % kGroup]) return true;  // the first
  return zero_bytes(noise.bytes(token / 8)) >> token % 8 & 1;
}

// -log(1 - u) with u = (bits + 1/2) / 2^52: an exponential variate, accurate near 0, where races
// are won. Each product and sum is rounded separately.
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

}  // namespace kiln
