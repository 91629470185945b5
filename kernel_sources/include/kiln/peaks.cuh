// The largest logit of each unit of a row, in shared memory: what later passes look at first.
#pragma once
#include "kiln/vocabulary.cuh"

namespace kiln {

constexpr int kSamplerBytes = 40 * 1024;  // of dynamic shared memory at the most

// The upper half of the largest key of a thread's i-th unit, or of 2, 4 ... units in a row where
// the memory left does not do. Each thread reads what it wrote itself.
struct Peaks {
  int start, shift;  // in the dynamic shared memory

  KILN_FN Peaks(int units, int bytes_taken) : start(bytes_taken), shift(0) {
    while (start + 2 * (units >> shift) + 4 * int(blockDim.x) > kSamplerBytes) ++shift;
  }
  KILN_FN uint16_t& slot(int i) const {
    uint16_t* slots = reinterpret_cast<uint16_t*>(dynamic_shared() + start);
    return slots[(i >> shift) * int(blockDim.x) + int(threadIdx.x)];
  }
  KILN_FN void put(int i, float largest) const {
    const uint32_t key = key_of(largest) >> 16;
    const bool first = (i & ((1 << shift) - 1)) == 0;
    slot(i) = uint16_t(first ? key : max(key, uint32_t(slot(i))));
  }
  KILN_FN bool reaches(int i, uint32_t key) const { return slot(i) >= key >> 16; }
};

// Append to a list those of this thread's units, or groups of units, that may hold a logit with at
// least a key; `listed` counts them all, what there is no room for too.
KILN_NOINLINE void list_above(Peaks peaks, uint32_t key, int units, uint32_t* list,
                              uint32_t* listed, uint32_t room) {
  const uint16_t* slots = reinterpret_cast<uint16_t*>(dynamic_shared() + peaks.start);
  const int step = blockDim.x, wide = step << peaks.shift;
#pragma unroll 1
  for (int first = threadIdx.x, at = threadIdx.x; first < units; first += 32 * wide) {
    uint32_t reach = 0;
#pragma unroll 4
    for (int i = 0; i < 32; ++i, at += step)
      if (first + i * wide < units) reach |= uint32_t(slots[at] >= key >> 16) << i;
    if (reach == 0) continue;
    uint32_t slot = atomicAdd(listed, uint32_t(__popc(reach)) << peaks.shift);
#pragma unroll 1
    for (; reach; reach &= reach - 1) {
      const int u = first + (31 - __clz(int(reach & (0 - reach)))) * wide;
#pragma unroll 1
      for (int v = u; v < u + wide; v += step, ++slot)
        if (slot < room) list[slot] = v;
    }
  }
}

}  // namespace kiln
