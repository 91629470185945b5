// Maps floats to integers of the same order, which a GPU reduces over a warp in one instruction.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

// Keys have the order of the floats; -0 equals +0.
KILN_FN uint32_t key_of(float x) {
  const uint32_t u = as_uint(add_rn(x, 0.0f));
  return u ^ (uint32_t(int32_t(u) >> 31) | 0x80000000u);
}
KILN_FN float value_of(uint32_t key) {
  return as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

}  // namespace kiln
