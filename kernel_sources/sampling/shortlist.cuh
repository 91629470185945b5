// A list of the largest logits of a row.
#pragma once
#include "sampling/bins.cuh"
#include "sampling/mass.cuh"
#include "sampling/peaks.cuh"

namespace kiln {

// Flag in the upper half of a bucket's mass: its keys belong to more than one number.
constexpr uint32_t kMixed = 1u << 31;
constexpr int kCandidates = 1024, kUnits = 3 * kBuckets, kSorted = 512;
constexpr int kLows = 112;  // for each warp: enough for 300 thousand tokens
constexpr int kFew = 128;  // up to here a list is sorted as a whole

struct SamplerShared {
  uint32_t warp_count[32];
  Partial<uint64_t> warp_mass, best, soonest, arrival, next;
  Partial<Sums> survey, row;
  uint64_t list[kCandidates], mass, kept, total;
  Bins bins;
  union {
    uint32_t units[kUnits];  // units to look at closely
    struct {
      uint32_t count[kBuckets], low[kBuckets], high[kBuckets];
    };
    struct {
      uint64_t some[kSorted], sorted[kSorted];  // entries of the list; sorted: largest first
    };
  };
  struct {  // tokens with a low random number, found by one warp
    int tokens[kLows];
    float clocks[kLows];
    int count;
  } lows[16];
  NoneLow none_low;
  uint32_t slots_used, num_units, bound, listed, bucket, tally, kept_count, total_from, num_sorted;
  uint32_t lows_lost;
  int wanted;
};

KILN_FN float infinity() { return as_float(0x7f800000u); }
KILN_FN uint32_t lowest_key() { return key_of(minus_infinity()) + 1; }  // of a finite number

// Weights of a row's logits, relative to the largest: 1.
struct Weights {
  float top, scale, lowest;
  KILN_FN Weights(float top, float temperature) : top(top) {
    scale = div_rn(1.44269504f, fminf(temperature, 1e30f));
    lowest = div_rn(-100.0f, scale);
  }
  KILN_FN float operator()(float x) const { return weight_of(sub_rn(x, top), scale, lowest); }
  KILN_FN uint64_t mass(float x) const { return mass_of((*this)(x)); }
  // A logit whose weight is slightly below 2^exponent; the margin exceeds all rounding errors.
  KILN_FN float logit_below(float exponent) const {
    const float up = (exponent - 0.01f) * lowest * -0.01f;
    return top + up - (fabsf(up) * 0x1p-16f + fabsf(top) * 0x1p-20f);
  }
  // A unit whose keys are all below this has mass 0.
  KILN_FN uint32_t zero_mass_key() const { return key_of(top + 0.45f * lowest); }
};

// A share of a mass, at least 1.
KILN_FN uint64_t share_of(float p, uint64_t mass) {
  const uint64_t share = uint64_t(double(p) * double(mass));
  return share ? share : 1;
}

// Find the lowest bucket above which count and mass stay below their limits. Sets s.bucket; s.tally
// and s.mass, of what is above it; s.kept_count and s.kept, which include it. `count` and `mass`
// are of keys above all buckets. whole: buckets hold all keys from s.bins.first on; s.total is set
// to the sum.
KILN_NOINLINE void find_bucket(int buckets, uint32_t count, uint64_t mass, uint32_t max_count,
                               uint64_t max_mass, bool whole, SamplerShared& s) {
  const int lane = threadIdx.x % 32;
  int share = 1;
#pragma unroll 1
  while (share * int(blockDim.x) < buckets) ++share;
  const int highest = buckets - 1 - int(threadIdx.x) * share;  // highest bucket of this thread
  auto mass_in = [&](int b) { return uint64_t(s.high[b] & ~kMixed) << 32 | s.low[b]; };
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
  if (whole && threadIdx.x == blockDim.x - 1) s.total = mass + m, s.total_from = s.bins.first;
  c += count - own_count, m += mass - own_mass;
#pragma unroll 1
  for (int b = highest; b > highest - share && b >= 0; --b) {
    const uint32_t next_count = c + s.count[b];
    const uint64_t next_mass = m + mass_in(b);
    const bool here = c < max_count && m < max_mass;
    if (here && (b == 0 || !(next_count < max_count && next_mass < max_mass)))
      s.bucket = b, s.tally = c, s.mass = m, s.kept_count = next_count, s.kept = next_mass;
    c = next_count, m = next_mass;
  }
}

// Return a key at most the `wanted`-th largest of the threads' best logits, and within a bf16 step
// of it; the lowest key if fewer threads have a finite logit. Usually one histogram of 512 buckets
// next to the largest key suffices; else one of all keys, then one of a bucket of it.
KILN_NOINLINE uint32_t bound_of(float best, float top, int wanted, SamplerShared& s) {
  constexpr int kBins = 512;
  const uint32_t own = key_of(best);
  uint32_t base = (max(key_of(top) >> 16, kBins - 1u) - (kBins - 1)) << 16, count = 0;
#pragma unroll 1
  for (int shift = 16;;) {
    __syncthreads();  // earlier readers are done
#pragma unroll 1
    for (int b = threadIdx.x; b < kBins; b += blockDim.x) s.count[b] = s.low[b] = s.high[b] = 0;
    __syncthreads();
    if (own >= base && (own - base) >> shift < kBins) atomicAdd(&s.count[(own - base) >> shift], 1u);
    __syncthreads();
    find_bucket(kBins, count, 0, wanted, ~uint64_t(0), false, s);
    __syncthreads();
    const uint32_t bound = base + (s.bucket << shift);
    const bool enough = int(s.kept_count) >= wanted;
    if (shift < 23 && (enough || shift < 16)) return max(bound, lowest_key());
    count = shift == 16 ? 0 : s.tally, base = shift == 16 ? 0 : bound, shift = shift == 16 ? 23 : 14;
  }
}

// List the logits from key `bound` on in s.list. s.listed > kCandidates: they do not all fit.
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
  for (int q = threadIdx.x; q - lane < queued; q += blockDim.x) {  // whole warps, for the atomicAdd
    const int u = q < queued ? int(s.units[q]) : row.num_units();
    float x[kUnit] = {};
    uint32_t above = 0;
    if (u < row.num_units()) {
      row.fetch(u, x);
      above = chosen(x, [&](float y) { return y >= least; });
    }
    uint32_t slot = atomicAdd(&s.listed, uint32_t(__popc(above)));
#pragma unroll 1
    for (; above; above &= above - 1, ++slot)
      list(slot, u * kUnit + first_of(above), pick(x, first_of(above)));
  }
  __syncthreads();
}

}  // namespace kiln
