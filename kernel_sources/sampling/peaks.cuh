// The largest logit of each unit of a row, in shared memory: later passes skip units by it.
#pragma once
#include "sampling/vocabulary.cuh"

namespace kiln {

constexpr int kSamplerBytes = 40 * 1024;  // limit of dynamic shared memory

// Upper half of the largest key of each thread's i-th unit; or of 2^shift units in a row, if shared
// memory is short.
struct Peaks {
  int start, shift;  // start: byte offset in dynamic shared memory

  KILN_FN Peaks(int units, int bytes_taken) : start((bytes_taken + 15) & ~15), shift(0) {
    while (start + 2 * (units >> shift) + 4 * int(blockDim.x) > kSamplerBytes) ++shift;
  }
  KILN_FN uint16_t& slot(int i) const {
    uint16_t* slots = reinterpret_cast<uint16_t*>(dynamic_shared() + start);
    return slots[(i >> shift) * int(blockDim.x) + int(threadIdx.x)];
  }
  KILN_FN void put(int i, float largest) const {
    if (shift == 0) {
      slot(i) = uint16_t(key_of(largest) >> 16);
      return;
    }
    const uint32_t key = key_of(largest) >> 16;
    const bool first = (i & ((1 << shift) - 1)) == 0;
    slot(i) = uint16_t(first ? key : max(key, uint32_t(slot(i))));
  }
  KILN_FN bool reaches(int i, uint32_t key) const { return slot(i) >= key >> 16; }
};

// Append the units, or groups of units, that may hold a logit from `key` on to a list. `listed`
// also counts what does not fit. Each thread checks eight slots at once, of any thread: a barrier
// must precede. Warps stay whole: separate additions of lanes to one shared word would take as long
// as everything else here.
KILN_NOINLINE void list_above(Peaks peaks, uint32_t key, int slots_used, uint32_t* list,
                              uint32_t* listed, uint32_t room) {
  const unsigned char* slots = dynamic_shared() + peaks.start;
  const int step = blockDim.x, wide = step << peaks.shift, lane = threadIdx.x % 32;
  const uint32_t least = key & 0xffff0000u;
#pragma unroll 1
  for (int first = 8 * threadIdx.x; first - 8 * lane < slots_used; first += 16 * step) {
    uint32_t reach = 0;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (first + 8 * n * step >= slots_used) break;
      const auto eight = load_vector<Chunk<float>>(slots + 2 * (first + 8 * n * step));
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        reach |= uint32_t(eight.word[k] << 16 >= least) << (8 * n + 2 * k);
        reach |= uint32_t(eight.word[k] >= least) << (8 * n + 2 * k + 1);
      }
    }
    uint32_t slot = atomicAdd(listed, uint32_t(__popc(reach)) << peaks.shift);
#pragma unroll 1
    for (; reach; reach &= reach - 1) {
      const int bit = first_of(reach);
      const int q = first + bit / 8 * 8 * step + bit % 8;
      int u = peaks.shift ? q + q / step * (wide - step) : q;
#pragma unroll 1
      for (int n = 0; n < wide; n += step, u += step, ++slot)
        if (slot < room) list[slot] = u;
    }
  }
}

}  // namespace kiln
