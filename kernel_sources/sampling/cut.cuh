// The cutoff key of a distribution, exact because masses are integers.
#pragma once
#include "sampling/visit.cuh"

namespace kiln {

// The mass of the logits from `key` on, without edited ones, as the first pass computes it. All
// threads share the units that reach the key: otherwise a few threads might have them all.
template <class T>
KILN_NOINLINE uint64_t mass_from(const Row<T>& row, Peaks peaks, uint32_t key, float top,
                                 float scale, SamplerShared& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.num_units = 0;
  __syncthreads();
  list_above(peaks, key, s.slots_used, s.units, &s.num_units, kUnits);
  __syncthreads();
  const bool all = s.num_units > kUnits;
  const int units = all ? row.num_units() : int(s.num_units);
  const float least = value_of(key), lowest = UnitWeights::lowest_of(scale);
  const TopWeight by(top, scale);
  uint64_t mass = 0;
#pragma unroll 1
  for (int q = threadIdx.x; q < units; q += blockDim.x) {
    const int u = all ? q : int(s.units[q]);
    if (u >= row.num_units()) continue;
    float x[kUnit];
    row.fetch(u, x);
    const uint32_t there = chosen(x, [&](float y) { return y >= least; });
    if (!there) continue;
    UnitWeights unit(x, largest(x), scale, lowest);
    mass += (uint64_t(unit.steps_of(there)) << 17) >> min(by.exponent - unit.exponent, 63u);
  }
  return by.mass(double(sums_of({mass, 0}, s.survey).a), 0);
}

// Limits of a cut: the smallest key c with count(keys > c) < count and mass(keys > c) < mass.
struct Limits {
  uint32_t count;
  uint64_t mass;
  uint32_t base;  // lower bound of c
  bool needs_mass;  // whether the mass limit applies
};

KILN_FN void add_to_bucket(int b, uint64_t mass, SamplerShared& s) {
  const uint32_t low = uint32_t(mass);  // shared memory has no fast 64-bit addition
  const uint32_t old = low ? atomicAdd(&s.low[b], low) : 0;
  const uint32_t high = uint32_t(mass >> 32) + (old + low < old);
  if (high) atomicAdd(&s.high[b], high);
}

// Whether a key belongs to a number of type T; an edited logit may be between two.
template <class T> KILN_FN bool is_representable(uint32_t key) {
  constexpr uint32_t kLow = (1u << kFreeBits<T>) - 1;
  return (key & kLow) == (key >> 31 ? 0 : kLow);
}

// Count a logit in its key's bucket; add its mass if `with_mass`, or in `middle`.
KILN_FN void tally(const Bins& bins, uint32_t key, uint32_t last, const Weights& weights,
                   bool with_mass, SamplerShared& s) {
  if (key - bins.first > last - bins.first) return;
  const int b = bins.bucket_of(key);
  atomicAdd(&s.count[b], 1u);
  if (with_mass || b == bins.middle) add_to_bucket(b, weights.mass(value_of(key)), s);
}

// Count an edited logit likewise. If it is between two numbers of T, its bucket is marked.
template <class T>
KILN_FN void tally_edited(const Bins& bins, uint32_t key, uint32_t last, const Weights& weights,
                         SamplerShared& s) {
  if (key - bins.first > last - bins.first) return;
  tally(bins, key, last, weights, true, s);
  if (!is_representable<T>(key)) atomicOr(&s.high[bins.bucket_of(key)], kMixed);
}

// Count all logits of a row except edited ones.
template <class T>
KILN_NOINLINE void tally_row(const Row<T>& row, Peaks peaks, uint32_t last, Weights weights,
                             bool with_mass, SamplerShared& s) {
  const Bins bins = s.bins;
  const bool simple = !with_mass && bins.middle < 0;
#pragma unroll 1
  for (int i = 0, u = threadIdx.x; u < row.num_units(); ++i, u += blockDim.x) {
    if (!peaks.reaches(i, bins.first)) continue;
    float x[kUnit];
    row.fetch(u, x);
#pragma unroll 1
    for (int at = 0; simple && at < kUnit / 4; ++at)
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float four[] = {x[k], x[k + 4], x[k + 8], x[k + 12]};
        const uint32_t from = key_of(pick(four, at)) - bins.upper;
        if (from <= last - bins.upper) atomicAdd(&s.count[from >> bins.shift], 1u);
      }
#pragma unroll 1
    for (int k = 0; !simple && k < kUnit; ++k)
      tally(bins, key_of(pick(x, k)), last, weights, with_mass, s);
  }
}

// Return the cutoff key c of the list or of the row, or the base if everything stays below both
// limits. Histograms start at the largest keys, and refine a bucket with keys of several numbers.
// If each bucket has one number, its mass is the number's times the count, which saves shared
// memory atomics. Sets s.kept and s.kept_count, mass and number of the keys from c on, and, if
// masses matter, s.total: the mass of the keys from s.total_from on.
template <class T>
KILN_NOINLINE uint32_t cut_key(const Row<T>& row, Peaks peaks, bool in_list, Weights weights,
                               Limits limits, SamplerShared& s) {
  constexpr int kFree = kFreeBits<T>;
  const bool edited = row.has_edits();
  const uint32_t base = max(in_list ? s.bound : limits.base, lowest_key());
  uint32_t first = base & ~0u << kFree, last = key_of(weights.top);
  uint32_t count = 0;  // of the keys above `last`; so is `mass`
  uint64_t mass = 0;
  int end = kFree;  // 2^end keys belong to one number
  bool past_zero = false, whole = true;  // whole: all keys from the lowest bucket up
#pragma unroll 1
  for (;;) {
    const Bins bins = Bins::of(first, last, end, past_zero);
    const int buckets = bins.count(last);
    const bool by_count = kFree && bins.shift == kFree;  // mass = the number's * count
    __syncthreads();
#pragma unroll 1
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) s.count[b] = s.low[b] = s.high[b] = 0;
    if (threadIdx.x == 0) s.bins = bins;
    __syncthreads();
    // First the numbers of type T; then, one by one, edited logits between them.
    const bool with_mass = limits.needs_mass && !by_count;
    const int singles = in_list ? int(s.listed) : 0;
#pragma unroll 1
    for (int j = threadIdx.x; j < singles; j += blockDim.x) {
      const uint32_t key = uint32_t(s.list[j] >> 32);
      if (!by_count || is_representable<T>(key)) tally(bins, key, last, weights, with_mass, s);
    }
    if (!in_list) tally_row(row, peaks, last, weights, with_mass, s);
    __syncthreads();
    if (limits.needs_mass && by_count) {
#pragma unroll 1
      for (int b = threadIdx.x; b < buckets; b += blockDim.x) {
        if (b == bins.middle) continue;
        const uint32_t key = bins.key_of_bucket(b);
        const float x = value_of(key >> 31 ? key : key | ((1u << kFree) - 1));
        const uint64_t all = s.count[b] * weights.mass(x);
        s.low[b] = uint32_t(all), s.high[b] = uint32_t(all >> 32);
      }
      __syncthreads();
    }
    if (edited) {
#pragma unroll 1
      for (int j = threadIdx.x; by_count && j < singles; j += blockDim.x) {
        const uint32_t key = uint32_t(s.list[j] >> 32);
        if (!is_representable<T>(key)) tally_edited<T>(bins, key, last, weights, s);
      }
      if (!in_list)
        row.each_edit([&](int, float x) { tally_edited<T>(bins, key_of(x), last, weights, s); });
      __syncthreads();
    }
    find_bucket(buckets, count, mass, limits.count, limits.mass, whole, s);
    __syncthreads();
    if (s.kept_count < limits.count && s.kept < limits.mass) {  // no cut among the counted keys
      if (bins.first == first) return base;
      count = s.kept_count, mass = s.kept, last = bins.first - 1, past_zero = true;
      continue;
    }
    count = s.tally, mass = s.mass, whole = false;
    if (int(s.bucket) == bins.middle) {
      first = max(first, bins.lower + 1), last = bins.upper - 1;
      continue;
    }
    const bool mixed = by_count && s.high[s.bucket] & kMixed;
    const uint32_t key = bins.key_of_bucket(s.bucket), own = (1u << bins.shift) - 1;
    last = min(last, key + own), first = max(first, key);
    if (bins.shift == end && !mixed) break;
    if (mixed) end = 0;
  }
  if (end && !(first >> 31)) first |= (1u << end) - 1;  // keys of negative numbers end in ones
  return max(first, lowest_key());
}

}  // namespace kiln
