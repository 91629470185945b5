// The parts of a site, such as q, k and v, as the tables of the adapter pool describe them. No
// kernel writes the tiles, the tables and the pool. So they can be read before pdl_wait.
#pragma once
#include "kiln/ptx/early.cuh"

namespace kiln {

constexpr int kMostParts = 3;  // MOST_PARTS in jit_kernels/ops/lora/spec.py
constexpr int kColumns = 16;   // of h in a block of lora_shrink: COLUMNS there

// Partial sums of a tile: for each token, those of 16 columns of h.
using Sums = float (*)[kColumns];

// A slice of an input row: the elements from `begin`, a multiple of 32, to `end`. `warps` warps
// share it, and this one is number `warp`.
struct Slice { int begin, end, warp, warps; };

// The rows of A of one adapter: first those of part 0, then those of part 1, and so on.
template <class T> struct StackedRows {
  const T* starts[kMostParts];
  int ranks[kMostParts];
  int64_t size;  // of a row

  KILN_FN StackedRows(const T* adapter_pool, const int32_t* rank_table, const int64_t* a_table,
                      int64_t size, int num_parts, int num_slots, int slot)
      : size(size) {
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      const int at = part * num_slots + slot;
      ranks[part] = part < num_parts ? load_early(rank_table + at) : 0;
      starts[part] = part < num_parts ? adapter_pool + load_early(a_table + at) : nullptr;
    }
  }

  // Whether each part begins at a multiple of 16 bytes. The offset of a part of rank 0 has no
  // meaning, and may make this false. That costs time and changes no result.
  KILN_FN bool is_aligned() const {
    uint64_t bits = 0;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) bits |= reinterpret_cast<uint64_t>(starts[part]);
    return bits % 16 == 0;
  }

  // Return row c, null if the sum of the ranks is not above c.
  KILN_FN const T* row(int c) const {
    const T* found = nullptr;
#pragma unroll
    for (int part = 0; part < kMostParts; ++part) {
      if (c >= 0 && c < ranks[part]) found = starts[part] + c * size;
      c -= ranks[part];
    }
    return found;
  }
};

}  // namespace kiln
