// Buckets for keys of logits.
#pragma once
#include "kiln/math/order.cuh"

namespace kiln {

constexpr int kBuckets = 1024, kBucketBits = 10;

// Next to each other; where there is no room for all keys, the largest count. But most keys between
// two numbers on either side of 0 are of numbers close to it, and so those can make one bucket,
// `middle`: half of the others are of larger ones, up to the last key, the rest of as many below 0.
struct Bins {
  uint32_t first;  // the least key that counts
  uint32_t upper;  // the least of the bucket after `middle`
  uint32_t lower;  // the largest of the bucket before it
  int shift;       // 2^shift keys are in any other
  int middle;      // -1: there is none, and none before it

  // For keys from `first` to `last`; a bucket has 2^least_shift of them or more. past_zero: those at
  // the top have been looked at, and buckets may lie on both sides of 0.
  KILN_FN static Bins of(uint32_t first, uint32_t last, int least_shift, bool past_zero) {
    constexpr int kCoarse = 16, kHalf = kBuckets / 2;
    const int bits = 32 - __clz(int(last - first));
    if (bits <= kBucketBits + kCoarse)
      return {first, first, 0, max(bits - kBucketBits, least_shift), -1};
    const uint32_t top = last >> kCoarse, upper = (top - (kHalf - 2)) << kCoarse;
    if (past_zero && last >> 31 && upper > 0x80000000u) {
      const uint32_t lower = ~upper, room = (kHalf << kCoarse) - 1;
      const bool all = lower <= first || lower - first <= room;
      return {all ? first : lower - room, upper, lower, kCoarse, kHalf};
    }
    const uint32_t least = (top - (kBuckets - 1)) << kCoarse;
    return {least, least, 0, kCoarse, -1};
  }
  KILN_FN int count(uint32_t last) const {
    return middle < 0 ? int((last - upper) >> shift) + 1 : kBuckets;
  }
  KILN_FN int bucket_of(uint32_t key) const {
    const int above = middle + 1 + int((key - upper) >> shift);
    const int below = middle - 1 - int((lower - key) >> shift);
    return key >= upper ? above : key > lower ? middle : below;
  }
  // The least key of a bucket that is not the middle.
  KILN_FN uint32_t key_of_bucket(int b) const {
    if (b > middle) return upper + (uint32_t(b - middle - 1) << shift);
    return lower + 1 - (uint32_t(middle - b) << shift);
  }
};

}  // namespace kiln
