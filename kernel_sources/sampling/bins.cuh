// Histogram buckets for keys of logits.
#pragma once
#include "kiln/math/order.cuh"

namespace kiln {

constexpr int kBuckets = 1024, kBucketBits = 10;

// Adjacent buckets of 2^shift keys; if they cannot hold all keys, they hold the largest. Most keys
// between a negative and a positive number belong to numbers near 0. These can share one bucket,
// `middle`: half of the others are above it, up to the last key, and the rest below it.
struct Bins {
  uint32_t first;  // the smallest key that is counted
  uint32_t upper;  // the smallest key above `middle`
  uint32_t lower;  // the largest key below `middle`
  int shift;       // every other bucket has 2^shift keys
  int middle;      // its index; -1: no such bucket, and none below it

  // Buckets for keys from `first` to `last`, of at least 2^least_shift keys each. past_zero: the
  // top keys were counted before, so buckets may be on both sides of 0.
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
  // The smallest key of a bucket other than `middle`.
  KILN_FN uint32_t key_of_bucket(int b) const {
    if (b > middle) return upper + (uint32_t(b - middle - 1) << shift);
    return lower + 1 - (uint32_t(middle - b) << shift);
  }
};

}  // namespace kiln
