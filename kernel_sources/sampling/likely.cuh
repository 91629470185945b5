// The mass of a row, and its most likely tokens in order.
#pragma once
#include "sampling/cut.cuh"

namespace kiln {

// The mass of a row.
template <class T>
KILN_NOINLINE uint64_t sum_of_row(const Row<T>& row, Peaks peaks, Weights weights,
                                  SamplerShared& s) {
  const float nothing = value_of(weights.zero_mass_key());
  const uint64_t own = visit(row, peaks, false, {Visit::mass, nothing, weights}, s);
  return sums_of({own, 0}, s.row).a;
}

// Sort the list's entries with keys from `key` on into s.sorted, largest first, and return their
// number. An entry's index is the number of larger entries; no two are equal.
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

// Return the entry after `previous` in one pass over the row, if ties are too many for the list.
template <class T>
KILN_NOINLINE uint64_t next_largest(const Row<T>& row, Peaks peaks, Weights weights,
                                    uint64_t previous, SamplerShared& s) {
  const float least = value_of(lowest_key());
  const uint64_t own = visit(row, peaks, false, {Visit::largest, least, weights, previous}, s);
  __syncthreads();  // the readers of the previous result are done
  return largest_of(own, s.next);
}

}  // namespace kiln
