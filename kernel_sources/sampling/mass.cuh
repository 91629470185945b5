// Sums of weights over a block: integers, so the order does not matter. One pass gives an
// approximate sum without knowing its scale in advance.
#pragma once
#include "kiln/ptx/warp.cuh"
#include "sampling/vocabulary.cuh"

namespace kiln {

struct alignas(16) Sums {
  uint64_t a, b;
};

// Shared memory of a reduction. Each reduction has its own, so none waits for the readers of
// another. Two uses of the same memory need a barrier in between.
template <class T> struct Partial {
  T of[32];
};

// The maximum over the block, in every thread.
KILN_FN uint64_t largest_in_warp(uint64_t x) {
  const uint32_t high = warp_largest(uint32_t(x >> 32));
  return uint64_t(high) << 32 | warp_largest(uint32_t(x >> 32) == high ? uint32_t(x) : 0);
}
KILN_NOINLINE uint64_t largest_of(uint64_t x, Partial<uint64_t>& partial) {
  x = largest_in_warp(x);
  if (threadIdx.x % 32 == 0) partial.of[threadIdx.x / 32] = x;
  __syncthreads();
  return largest_in_warp(threadIdx.x % 32 < blockDim.x / 32 ? partial.of[threadIdx.x % 32] : 0);
}

// Two integer sums over the block, in every thread. A warp adds parts of 26 bits, whose sums fit in
// 31 bits.
KILN_FN uint64_t sum_in_warp(uint64_t x) {
  constexpr int kPart = 26, kLow = (1 << kPart) - 1;
  const uint64_t low = uint32_t(warp_total(int(x) & kLow));
  const uint64_t middle = uint32_t(warp_total(int(x >> kPart) & kLow));
  return low + (middle << kPart) + (uint64_t(warp_total(int(x >> 2 * kPart))) << 2 * kPart);
}
KILN_NOINLINE Sums sums_of(Sums x, Partial<Sums>& partial) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // converges the lanes for the compiler
  x = {sum_in_warp(x.a), sum_in_warp(x.b)};
  if (lane == 0) partial.of[threadIdx.x / 32] = x;
  __syncthreads();
  x = {0, 0};
  if (lane < int(blockDim.x) / 32) x = partial.of[lane];
  return {sum_in_warp(x.a), sum_in_warp(x.b)};
}

KILN_FN float sum_of(const float* w) {  // of eight
  const float left = add_rn(add_rn(w[0], w[1]), add_rn(w[2], w[3]));
  return add_rn(left, add_rn(add_rn(w[4], w[5]), add_rn(w[6], w[7])));
}

// Weights of a unit, relative to a power of two near the largest, so that rounding errors are
// small.
struct UnitWeights {
  static constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: the low bits of a sum are an integer
  float w[kUnit];
  uint32_t exponent;

  // largest: of the unit's logits. lowest: far below any logit that matters.
  KILN_FN UnitWeights(const float (&x)[kUnit], float largest, float scale, float lowest) {
    const float shifted = fma_rn(fmaxf(largest, lowest), scale, kRounds);
    const float whole = sub_rn(shifted, kRounds);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) w[k] = exp2_fast(fma_rn(x[k], scale, -whole));
    exponent = as_uint(shifted);
  }
  // Logits below this count as if they were equal to it.
  KILN_FN static float lowest_of(float scale) { return div_rn(-0x1p20f, scale); }
  KILN_FN float sum() const { return sum_of(w) + sum_of(w + 8); }
  // Convert a sum to steps of 2^-23.
  KILN_FN static uint32_t steps(float sum) { return uint32_t(to_int_rn(sum * 0x1p23f)); }
  // The sum of the chosen tokens (one bit each) in such steps: the sum of all, minus that of the
  // others, which is rounded separately.
  KILN_FN uint32_t steps_of(uint32_t chosen) {
    const uint32_t all = steps(sum());
#pragma unroll
    for (int k = 0; k < kUnit; ++k) w[k] = chosen >> k & 1 ? 0.0f : w[k];
    return all - steps(sum());
  }
};

// The unit of masses: 2^(exponent + rest) is the weight of the row's largest logit.
struct TopWeight {
  uint32_t exponent;
  float rest;
  KILN_FN TopWeight(float top, float scale) {
    const float shifted = fma_rn(top, scale, UnitWeights::kRounds);
    exponent = as_uint(shifted), rest = fma_rn(top, scale, UnitWeights::kRounds - shifted);
  }
  // Convert steps of 2^(exponent - 40 - less) to steps of 2^-40 of that weight.
  KILN_FN uint64_t mass(double steps, uint32_t less) const {
    return uint64_t(steps * double(as_float((127 - less) << 23) * exp2_fast(-rest)));
  }
};

// A sum of integers below 2^28 times powers of two; its scale is not known in advance. Exponents
// are grouped in blocks of twenty, and the three highest blocks so far have one integer sum each.
// What is lower is dropped: less than 2^-36 of a unit. The order does not matter. Two million
// tokens fit.
struct RunningMass {
  static constexpr uint32_t kBlock = 20;
  uint32_t block;
  uint64_t high, middle, low;

  KILN_FN void add(uint32_t exponent, uint32_t mass) {
    const uint32_t own = exponent / kBlock;
    if (own > block) {
      const uint32_t up = own - block;
      low = up == 1 ? middle : up == 2 ? high : 0;
      middle = up == 1 ? high : 0;
      high = 0, block = own;
    }
    const uint64_t shifted = uint64_t(mass) << exponent % kBlock;
    if (own == block) high += shifted;
    if (own + 1 == block) middle += shifted;
    if (own + 2 == block) low += shifted;
  }
  // The sum in two parts, relative to block `top`: a step of b is 2^40 steps of a.
  KILN_FN Sums sums(uint32_t top) const {
    const uint32_t up = top - block;
    const uint64_t c = up == 0 ? high : 0, b = up == 0 ? middle : up == 1 ? high : 0;
    const uint64_t a = up == 0 ? low : up == 1 ? middle : up == 2 ? high : 0;
    return {a + ((b & ((1u << kBlock) - 1)) << kBlock), c + (b >> kBlock)};
  }
};

// The total of the block's threads, in steps of 2^-40 of the weight of the row's largest logit.
KILN_FN uint64_t mass_of_row(const RunningMass& mass, float top, float scale,
                             Partial<Sums>& partial) {
  const TopWeight by(top, scale);
  const Sums all = sums_of(mass.sums(by.exponent / RunningMass::kBlock), partial);
  return by.mass(double(all.b) * 0x1p40 + double(all.a), 23 + by.exponent % RunningMass::kBlock);
}

}  // namespace kiln
