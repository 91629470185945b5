// The mass of a row, and its likeliest tokens in order.
#pragma once
#include "kiln/shortlist.cuh"

namespace kiln {

// The mass of a row.
template <class T>
KILN_NOINLINE uint64_t sum_of_row(const Row<T>& row, Peaks peaks, Weights weights,
                                  SamplerShared& s) {
  uint64_t mass = 0;
  const uint32_t nothing = weights.key_of_nothing();
  auto wanted = [&](int i) { return peaks.reaches(i, nothing); };
  row.each_unit(wanted, [&](const float (&x)[kUnit]) {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) mass += weights.mass(x[k]);
  });
  row.each_edit([&](int, float x) { mass += weights.mass(x); });
  return sums_of({mass, 0}, s.row).a;
}

// How many logits of a row without edits are larger than one.
template <class T>
KILN_NOINLINE int num_larger(const Row<T>& row, Peaks peaks, float than, SamplerShared& s) {
  uint64_t larger = 0;
#pragma unroll 1
  for (int i = 0, u = threadIdx.x; u < row.num_units(); ++i, u += blockDim.x) {
    const int end = peaks.reaches(i, key_of(than)) ? min(kUnit * (u + 1), row.vocab) : 0;
#pragma unroll 4
    for (int token = kUnit * u; token < end; ++token) larger += row.at(token) > than;
  }
  return int(sums_of({larger, 0}, s.survey).a);  // of s.row the mass may still be read
}

// Put the entries of the list with at least a key into `sorted`, the largest first, and return how
// many there are: each goes where as many precede it as are larger, and no two are equal.
KILN_NOINLINE int sort_from(uint32_t key, SamplerShared& s) {
  __syncthreads();
  if (threadIdx.x == 0) s.num_sorted = 0;
  __syncthreads();
#pragma unroll 1
  for (int j = threadIdx.x; j < int(s.listed); j += blockDim.x) {
    if (uint32_t(s.list[j] >> 32) < key) continue;
    const uint32_t slot = atomicAdd(&s.num_sorted, 1u);
    if (slot < kSorted) s.some[slot] = s.list[j];
  }
  __syncthreads();
  const int n = s.num_sorted, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int c = threadIdx.x / 32; n <= kSorted && c < n; c += blockDim.x / 32) {
    const uint64_t own = s.some[c];
    int larger = 0;
#pragma unroll 1
    for (int j = 0; j < n; j += 32)
      larger += __popc(__ballot_sync(0xffffffffu, j + lane < n && s.some[j + lane] > own));
    if (lane == 0) s.sorted[larger] = own;
  }
  __syncthreads();
  return n;
}

// The likeliest tokens of the plain softmax where equals are too many for the list: one a pass.
template <class T>
KILN_NOINLINE uint64_t next_largest(const Row<T>& row, uint64_t previous, SamplerShared& s) {
  uint64_t next = 0;
  auto consider = [&](int token, float x) {
    const uint64_t entry = entry_of(x, token);
    if (x > minus_infinity() && entry < previous && entry > next) next = entry;
  };
  row.each_token(consider);
  __syncthreads();  // the readers of the one before are done
  return largest_of(next, s.next);
}

}  // namespace kiln
