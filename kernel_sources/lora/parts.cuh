// A site's parts, such as q, k and v, in the tables of the adapter pool. No kernel writes the tiles,
// the tables and the pool, so that they are read before pdl_wait.
#pragma once
#include "kiln/ptx/early.cuh"

namespace kiln {

constexpr int kMostParts = 3;  // MOST_PARTS in jit_kernels/ops/lora/spec.py
constexpr int kColumns = 16;   // of h in a block of lora_shrink: COLUMNS there

// A row of 16 sums for each token of a tile.
using Sums = float (*)[kColumns];

// A part of a row from `begin`, a multiple of 32, on, and the warps that share it.
struct Slice { int begin, end, warp, warps; };

// The rows of A of one adapter: those of all parts, one part behind the other.
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

  // Whether each part begins at a multiple of 16 bytes. A part without a rank may say no.
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
