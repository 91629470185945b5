// Neighbouring tokens of one adapter, which share what a block loads of its weights.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

constexpr int kRunTokens = 4;  // TILE in jit_kernels/ops/lora/spec.py

// Call of(slot, first, count) for each run of tokens of one adapter, from token `first` on, before
// `end`. All threads of a block must make the call.
template <class Function>
KILN_FN void for_each_run(const int32_t* token_slots, int64_t first, int64_t end, Function of) {
  while (first < end) {
    const int slot = token_slots[first];
    int count = 1;
    while (first + count < end && token_slots[first + count] == slot) ++count;
    if (slot >= 0) of(slot, first, count);
    first += count;
  }
}

}  // namespace kiln
