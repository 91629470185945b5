// The largest logits of a row in a list, and the cut of a distribution: exact by integers.
#pragma once
#include "kiln/mass.cuh"
#include "kiln/peaks.cuh"

namespace kiln {

constexpr int kCandidates = 1024, kBuckets = 1024, kUnits = 3 * kBuckets, kSorted = 512;
constexpr int kLows = 112;  // of a warp: enough for 300 thousand tokens
constexpr int kFew = 128;  // a list that is sorted as a whole

struct SamplerShared {
  uint32_t warp_count[32];
  Partial<uint64_t> warp_mass, best, soonest, arrival, next;
  Partial<Sums> survey, row;
  uint64_t list[kCandidates], mass, total, kept;
  union {
    uint32_t units[kUnits];  // what is to be looked at closely
    struct {
      uint32_t count[kBuckets], low[kBuckets], high[kBuckets];
    };
    struct {
      uint64_t some[kSorted], sorted[kSorted];  // of the list, the largest first
    };
  };
  struct {  // the tokens whose random number is low, of the groups that a warp looked at
    int tokens[kLows];
    float clocks[kLows];
    int count;
  } lows[16];
  NoneLow none_low;
  uint32_t slots_used, num_units, bound, listed, bucket, tally, num_sorted, lows_lost;
};

KILN_FN float infinity() { return as_float(0x7f800000u); }
KILN_FN uint32_t lowest_key() { return key_of(minus_infinity()) + 1; }  // of a finite number

// The weights of a row: 1 for its largest logit.
struct Weights {
  float top, scale, lowest;
  KILN_FN Weights(float top, float temperature) : top(top) {
    scale = div_rn(1.44269504f, fminf(temperature, 1e30f));
    lowest = div_rn(-100.0f, scale);
  }
  KILN_FN float operator()(float x) const { return weight_of(sub_rn(x, top), scale, lowest); }
  KILN_FN uint64_t mass(float x) const { return mass_of((*this)(x)); }
  // A logit whose weight is less than 2^exponent, by little; more than all roundings together.
  KILN_FN float logit_below(float exponent) const {
    const float up = (exponent - 0.01f) * lowest * -0.01f;
    return top + up - (fabsf(up) * 0x1p-16f + fabsf(top) * 0x1p-20f);
  }
  // The key below which a whole unit has none.
  KILN_FN uint32_t key_of_nothing() const { return key_of(top + 0.45f * lowest); }
};

// A share of a mass, at least the smallest there is.
KILN_FN uint64_t share_of(float p, uint64_t mass) {
  const uint64_t share = uint64_t(double(p) * double(mass));
  return share ? share : 1;
}

// The lowest bucket before which count and mass stay below their limits, from the top down, into
// s.bucket, s.tally and s.mass, with what precedes it; s.kept is with it, s.total of all.
KILN_NOINLINE void find_bucket(int buckets, uint32_t count, uint64_t mass, uint32_t max_count,
                               uint64_t max_mass, SamplerShared& s) {
  const int lane = threadIdx.x % 32;
  int share = 1;
#pragma unroll 1
  while (share * int(blockDim.x) < buckets) ++share;
  const int highest = buckets - 1 - int(threadIdx.x) * share;  // of this thread's share
  auto mass_in = [&](int b) { return uint64_t(s.high[b]) << 32 | s.low[b]; };
  uint32_t c = 0;
  uint64_t m = 0;
#pragma unroll 1
  for (int b = highest; b > highest - share && b >= 0; --b) c += s.count[b], m += mass_in(b);
  const uint32_t own_count = c;
  const uint64_t own_mass = m;
#pragma unroll 1
  for (int d = 1; d < 32; d *= 2) {
    const uint32_t other_count = __shfl_up_sync(0xffffffffu, c, d);
    const uint64_t other_mass = __shfl_up_sync(0xffffffffu, m, d);
    if (lane >= d) c += other_count, m += other_mass;
  }
  if (lane == 31) s.warp_count[threadIdx.x / 32] = c, s.warp_mass.of[threadIdx.x / 32] = m;
  __syncthreads();
  const bool before = lane < int(threadIdx.x) / 32;
  c += warp_total(before ? s.warp_count[lane] : 0);
  m += sum_in_warp(before ? s.warp_mass.of[lane] : 0);
  if (threadIdx.x == blockDim.x - 1) s.total = max(s.total, mass + m);
  c += count - own_count, m += mass - own_mass;
#pragma unroll 1
  for (int b = highest; b > highest - share && b >= 0; --b) {
    const uint32_t next_count = c + s.count[b];
    const uint64_t next_mass = m + mass_in(b);
    const bool here = c < max_count && m < max_mass;
    if (here && (b == 0 || !(next_count < max_count && next_mass < max_mass)))
      s.bucket = b, s.tally = c, s.mass = m, s.kept = next_mass;
    c = next_count, m = next_mass;
  }
}

// A key not above the `wanted`-th largest of the threads' best logits, and less than a step of bf16
// from it; the lowest where fewer threads have a finite one. By histograms of 512: of the keys next
// to the largest, mostly; else of all, and then of one of these buckets.
KILN_NOINLINE uint32_t bound_of(float best, float top, int wanted, SamplerShared& s) {
  constexpr int kBins = 512;
  const uint32_t own = key_of(best);
  uint32_t base = ((max(key_of(top) >> 16, kBins - 1u)) - (kBins - 1)) << 16, count = 0;
#pragma unroll 1
  for (int shift = 16;;) {
    __syncthreads();  // earlier readers are done
#pragma unroll 1
    for (int b = threadIdx.x; b < kBins; b += blockDim.x) s.count[b] = s.low[b] = s.high[b] = 0;
    if (threadIdx.x == 0) s.total = 0;
    __syncthreads();
    if (own >= base && (own - base) >> shift < kBins) atomicAdd(&s.count[(own - base) >> shift], 1u);
    __syncthreads();
    find_bucket(kBins, count, 0, wanted, ~uint64_t(0), s);
    __syncthreads();
    const uint32_t bound = base + (s.bucket << shift);
    const bool enough = int(s.tally + s.count[s.bucket]) >= wanted;
    if (shift < 23 && (enough || shift < 16)) return max(bound, lowest_key());
    count = shift == 16 ? 0 : s.tally, base = shift == 16 ? 0 : bound, shift = shift == 16 ? 23 : 14;
  }
}

// List in s.list the logits whose key is at least a bound: s.listed of them, or too many for it.
template <class T>
KILN_NOINLINE void list_from(const Row<T>& row, Peaks peaks, uint32_t bound, SamplerShared& s) {
  const float least = value_of(bound);
  __syncthreads();
  if (threadIdx.x == 0) s.listed = s.num_units = 0, s.bound = bound;
  __syncthreads();
  list_above(peaks, bound, s.slots_used, s.units, &s.num_units, kUnits);
  auto list = [&](uint32_t slot, int token, float x) {
    if (slot < kCandidates) s.list[slot] = entry_of(x, token);
  };
  row.each_edit([&](int token, float x) {
    if (x >= least) list(atomicAdd(&s.listed, 1u), token, x);
  });
  __syncthreads();
  const int queued = min(s.num_units, uint32_t(kUnits)), lane = threadIdx.x % 32;
  if (s.num_units > kUnits && threadIdx.x == 0) atomicAdd(&s.listed, kCandidates + 1u);
#pragma unroll 1
  for (int q = threadIdx.x; q - lane < queued; q += blockDim.x) {  // whole warps, for the addition
    const int u = q < queued ? int(s.units[q]) : row.num_units();
    uint32_t above = 0;
    if (u < row.num_units()) above = row.chosen_of(u, [&](float x) { return x >= least; });
    uint32_t slot = atomicAdd(&s.listed, uint32_t(__popc(above)));
    row.each_chosen(u, above, [&](int token, float x) { list(slot++, token, x); });
  }
  __syncthreads();
}

// f(token, logit): the list, over the block's threads.
template <class F> KILN_FN void each_listed(const SamplerShared& s, F f) {
#pragma unroll 1
  for (int j = threadIdx.x; j < int(s.listed); j += blockDim.x)
    f(token_of_entry(s.list[j]), value_of_entry(s.list[j]));
}

// The mass of what is in the list, but of edited tokens, as the first pass has counted it; `top` is
// the largest logit.
template <class T>
KILN_NOINLINE uint64_t listed_mass(const Row<T>& row, float top, float scale, SamplerShared& s) {
  const float least = value_of(s.bound), lowest = UnitWeights::lowest_of(scale);
  const TopWeight by(top, scale);
  uint64_t mass = 0;
  each_listed(s, [&](int token, float) {
    float x[kUnit];
    row.fetch(token / kUnit, x);
    const uint32_t listed = chosen(x, [&](float y) { return y >= least; });
    const uint32_t own = 1u << token % kUnit;  // a unit counts with the first of its tokens
    if ((listed & (2 * own - 1)) != own) return;
    UnitWeights weights(x, largest(x), scale, lowest);
    mass += (uint64_t(weights.steps_of(listed)) << 17) >> min(by.exponent - weights.exponent, 63u);
  });
  return by.mass(double(sums_of({mass, 0}, s.survey).a), 0);
}

KILN_NOINLINE void add_to_bucket(int b, Weights weights, float x, SamplerShared& s) {
  const uint64_t own = weights.mass(x);  // shared memory has no fast 64-bit addition
  const uint32_t low = uint32_t(own), old = low ? atomicAdd(&s.low[b], low) : 0;
  const uint32_t high = uint32_t(own >> 32) + (old + low < old);
  if (high) atomicAdd(&s.high[b], high);
}

// What a cut leaves: the smallest key c with count(keys > c) < count and mass(keys > c) < mass.
struct Limits {
  uint32_t count;
  uint64_t mass;
  uint32_t base;  // c is not below
  bool adds_up;   // masses matter
};

// That key, or the base where everything together stays below both: of the list, or of the row.
// Ten bits of the key at a time, by histograms. s.total is the mass of all that counted, s.kept
// that of the keys from c on.
template <class T>
KILN_NOINLINE uint32_t descend(const Row<T>& row, Peaks peaks, bool in_list, Weights weights,
                               Limits limits, SamplerShared& s) {
  const bool rounded = kFreeBits<T> && row.edits.first == row.edits.last;
  const int end = rounded ? kFreeBits<T> : 0;
  const uint32_t base = (in_list ? s.bound : limits.base) & ~0u << end;
  uint32_t prefix = 0, count = 0;  // of key - base; count and mass: of the keys above the bucket
  uint64_t mass = 0;
  const int units = in_list ? 0 : row.num_units();
  const int singles = in_list ? int(s.listed) : row.edits.last - row.edits.first;
#pragma unroll 1
  for (int from = max(32 - __clz(int(key_of(weights.top) - base)), end + 1); from > end;) {
    const int shift = max(from - 10, end), buckets = 1 << (from - shift);
    const bool one_value = rounded && shift == end;  // in a bucket
    __syncthreads();
#pragma unroll 1
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) s.count[b] = s.low[b] = s.high[b] = 0;
    // The first level sees all keys, and those after it no more.
    if (prefix == 0 && threadIdx.x == 0) s.total = 0;
    __syncthreads();
    auto inside = [&](float x) {
      const uint32_t key = key_of(x);
      return key >= base && uint64_t((key - base) ^ prefix) >> from == 0;
    };
    auto tally = [&](int, float x) {
      const uint32_t b = (key_of(x) - base) >> shift & (buckets - 1);
      if (limits.adds_up && !one_value) add_to_bucket(b, weights, x, s);
      atomicAdd(&s.count[b], 1u);
    };
#pragma unroll 1
    for (int i = 0, u = threadIdx.x; u < units; ++i, u += blockDim.x)
      if (peaks.reaches(i, base + prefix)) row.each_chosen(u, row.chosen_of(u, inside), tally);
#pragma unroll 1
    for (int j = threadIdx.x; j < singles; j += blockDim.x) {
      const float x = in_list ? value_of_entry(s.list[j]) : row.edited(row.edits.first + j);
      if (inside(x)) tally(0, x);
    }
    __syncthreads();
    if (limits.adds_up && one_value) {
#pragma unroll 1
      for (int b = threadIdx.x; b < buckets; b += blockDim.x) {
        const uint32_t key = base + prefix + (uint32_t(b) << shift);
        const float x = value_of(key >> 31 ? key : key | ((1u << end) - 1));
        const uint64_t all = s.count[b] * weights.mass(x);
        s.low[b] = uint32_t(all), s.high[b] = uint32_t(all >> 32);
      }
      __syncthreads();
    }
    find_bucket(buckets, count, mass, limits.count, limits.mass, s);
    __syncthreads();
    prefix |= s.bucket << shift;
    count = s.tally, mass = s.mass, from = shift;
  }
  uint32_t key = base + prefix;
  if (rounded && !(key >> 31)) key |= (1u << end) - 1;  // of a negative number: all ones
  return max(key, lowest_key());
}

}  // namespace kiln
