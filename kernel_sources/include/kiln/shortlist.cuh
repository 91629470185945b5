// The largest logits of a row in a sorted list, and the cut of a distribution: exact by integers.
#pragma once
#include "kiln/vocabulary.cuh"

namespace kiln {

constexpr int kCandidates = 512, kBuckets = 1024;

struct SamplerShared {
  uint64_t partial[32], list[kCandidates], sorted[kCandidates], above[kCandidates];
  uint64_t mass, drawn_mass, plain_mass;
  uint32_t rank[kCandidates], count[kBuckets], low[kBuckets], high[kBuckets];
  uint32_t bound, listed, bucket, tally;
};

struct Sum {
  static constexpr uint64_t kIdentity = 0;
  KILN_FN uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Max {
  static constexpr uint64_t kIdentity = 0;
  KILN_FN uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
struct Min {
  static constexpr uint64_t kIdentity = ~uint64_t(0);
  KILN_FN uint64_t operator()(uint64_t a, uint64_t b) const { return a < b ? a : b; }
};

// Over the block, in every thread. None of the three has an order.
template <class Op> KILN_NOINLINE uint64_t reduce(uint64_t x, uint64_t* partial) {
#pragma unroll 1
  for (int m = 16; m; m >>= 1) x = Op()(x, __shfl_xor_sync(0xffffffffu, x, m));
  __syncthreads();  // earlier readers of partial are done
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? partial[threadIdx.x % 32] : Op::kIdentity;
#pragma unroll 1
  for (int m = 16; m; m >>= 1) x = Op()(x, __shfl_xor_sync(0xffffffffu, x, m));
  return x;
}

KILN_FN float infinity() { return as_float(0x7f800000u); }
KILN_FN uint32_t lowest_key() { return key_of(minus_infinity()) + 1; }  // of a finite number

// The weights of a row: 1 for its largest logit.
struct Weights {
  float top, scale;
  KILN_FN float operator()(float x) const { return weight_of(sub_rn(x, top), scale); }
  KILN_FN uint64_t mass(float x) const { return mass_of((*this)(x)); }
  // Of a whole unit, in one number; 0 where its largest logit tells so.
  KILN_FN uint64_t mass(const float (&x)[kUnit], float largest) const {
    if (mul_rn(sub_rn(largest, top), scale) < -44.0f) return 0;
    float w[kUnit];
#pragma unroll
    for (int k = 0; k < kUnit; ++k) w[k] = (*this)(x[k]);
    const float left = add_rn(add_rn(w[0], w[1]), add_rn(w[2], w[3]));
    return mass_of(add_rn(left, add_rn(add_rn(w[4], w[5]), add_rn(w[6], w[7]))));
  }
};

// A share of a mass, at least the smallest there is.
KILN_FN uint64_t share_of(float p, uint64_t mass) {
  const uint64_t share = uint64_t(double(p) * double(mass));
  return share ? share : 1;
}

// A key not above the `wanted`-th largest of the threads' best logits, and close to it; the lowest
// where fewer threads have a finite one. Keys closer than `grain` are taken for one.
KILN_FN uint32_t bound_of(float best, float top, int wanted, uint32_t grain) {
  uint32_t low = lowest_key(), high = key_of(top) + 1;
#pragma unroll 1
  while (high - low > grain) {
    const uint32_t middle = low + (high - low) / 2;
    const int n = __syncthreads_count(key_of(best) >= middle);
    if (n < wanted) high = middle;
    else if (low = middle; n <= wanted + wanted / 8) break;
  }
  return low;
}

// Put list[0 .. n - 1] into `sorted`, largest first: each goes where as many precede it as are
// larger. All threads count; no two entries are equal.
KILN_NOINLINE void sort_list(int n, SamplerShared& s) {
#pragma unroll 1
  for (int c = threadIdx.x; c < n; c += blockDim.x) s.rank[c] = 0;
  __syncthreads();
  const int padded = (n + 31) / 32 * 32, parts = max(1, int(blockDim.x) / max(padded, 32));
#pragma unroll 1
  for (int i = threadIdx.x; i < padded * parts; i += blockDim.x) {
    const int c = i % padded, part = i / padded, last = (part + 1) * n / parts;
    if (c >= n) continue;
    uint32_t larger = 0;
#pragma unroll 1
    for (int j = part * n / parts; j < last; ++j) larger += s.list[j] > s.list[c];
    atomicAdd(&s.rank[c], larger);
  }
  __syncthreads();
#pragma unroll 1
  for (int c = threadIdx.x; c < n; c += blockDim.x) s.sorted[s.rank[c]] = s.list[c];
  __syncthreads();
}

// How many j < n have a property; in every thread.
template <class P> KILN_FN int count_below(int n, P has) {
  int total = 0;
#pragma unroll 1
  for (int start = 0; start < n; start += blockDim.x) {
    const int j = start + threadIdx.x;
    total += __syncthreads_count(j < n && has(j));
  }
  return total;
}

// above[j] = mass of sorted[0 .. j - 1] for j < n; return the mass of all n.
KILN_NOINLINE uint64_t add_up(int n, const Weights& weights, SamplerShared& s) {
#pragma unroll 1
  for (int j = threadIdx.x; j < n; j += blockDim.x)
    s.above[j] = weights.mass(value_of_entry(s.sorted[j]));
  __syncthreads();
  if (threadIdx.x < 32) {
    const int share = (n + 31) / 32, first = min(int(threadIdx.x) * share, n);
    const int last = min(first + share, n);
    uint64_t own = 0;
#pragma unroll 1
    for (int j = first; j < last; ++j) own += s.above[j];
    uint64_t before = own;
#pragma unroll 1
    for (int d = 1; d < 32; d *= 2) {
      const uint64_t other = __shfl_up_sync(0xffffffffu, before, d);
      if (int(threadIdx.x) >= d) before += other;
    }
    if (threadIdx.x == 31) s.mass = before;
    before -= own;
#pragma unroll 1
    for (int j = first; j < last; ++j) {
      const uint64_t mass = s.above[j];
      s.above[j] = before;
      before += mass;
    }
  }
  __syncthreads();
  return s.mass;
}

// The smallest key c of the row with count(keys > c) < max_count and mass(keys > c) < max_mass, or
// the lowest of all where everything together stays below both. For distributions so flat that
// the list does not reach: ten bits of the key at a time, by histograms.
template <class T>
KILN_NOINLINE uint32_t descend(const Row<T>& row, const Weights& weights, uint32_t max_count,
                               uint64_t max_mass, SamplerShared& s) {
  const bool rounded = sizeof(T) == 2 && row.edits.first == row.edits.last;
  const int end = rounded ? 13 : 0;  // bf16 and fp16 do not differ below this bit
  uint32_t prefix = 0, count = 0;    // count and mass: of the keys above the current bucket
  uint64_t mass = 0;
  for (int from = 32; from > end;) {
    const int shift = max(from - 10, end), buckets = 1 << (from - shift);
    __syncthreads();
#pragma unroll 1
    for (int b = threadIdx.x; b < buckets; b += blockDim.x) s.count[b] = s.low[b] = s.high[b] = 0;
    __syncthreads();
    auto tally = [&](int, float x) {
      const uint32_t key = key_of(x), b = key >> shift & (buckets - 1);
      if (key < lowest_key() || (from < 32 && (key ^ prefix) >> from)) return;
      atomicAdd(&s.count[b], 1u);
      if (max_mass == ~uint64_t(0)) return;
      const uint64_t own = weights.mass(x);  // shared memory has no fast 64-bit addition
      const uint32_t low = uint32_t(own), old = low ? atomicAdd(&s.low[b], low) : 0;
      const uint32_t high = uint32_t(own >> 32) + (old + low < old);
      if (high) atomicAdd(&s.high[b], high);
    };
    row.each_token(tally);
    __syncthreads();
    if (threadIdx.x < 32) {  // each lane walks its share of the buckets, from the top down
      const int share = (buckets + 31) / 32, first = buckets - 1 - int(threadIdx.x) * share;
      auto mass_in = [&](int b) { return uint64_t(s.high[b]) << 32 | s.low[b]; };
      uint32_t own_count = 0;
      uint64_t own_mass = 0;
#pragma unroll 1
      for (int b = first; b > first - share && b >= 0; --b) own_count += s.count[b], own_mass += mass_in(b);
      uint32_t c = own_count;
      uint64_t m = own_mass;
#pragma unroll 1
      for (int d = 1; d < 32; d *= 2) {
        const uint32_t other_count = __shfl_up_sync(0xffffffffu, c, d);
        const uint64_t other_mass = __shfl_up_sync(0xffffffffu, m, d);
        if (int(threadIdx.x) >= d) c += other_count, m += other_mass;
      }
      c += count - own_count, m += mass - own_mass;
      int b = first;
      const bool here = b >= 0 && c < max_count && m < max_mass;
      while (here && b > 0 && b - 1 > first - share && c + s.count[b] < max_count &&
             m + mass_in(b) < max_mass) {
        c += s.count[b], m += mass_in(b);
        --b;
      }
      const uint32_t lanes = __ballot_sync(0xffffffffu, here);  // the first so many; the last knows
      if (int(threadIdx.x) == 31 - __clz(int(lanes))) s.bucket = b, s.tally = c, s.mass = m;
    }
    __syncthreads();
    prefix |= s.bucket << shift;
    count = s.tally, mass = s.mass, from = shift;
  }
  if (rounded && !(prefix >> 31)) prefix |= (1u << end) - 1;  // of a negative number: all ones
  return max(prefix, lowest_key());
}

}  // namespace kiln
