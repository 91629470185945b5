// Approximate arithmetic in one instruction, by name: there is no fast-math switch.
#pragma once
#include "kiln/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// 1 / x, at most one unit in the last place off; subnormals are taken for 0, on either side.
KILN_FN float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#else  // ---- host ------------------------------------------------------------------------------
KILN_FN float reciprocal_fast(float x) { return 1.0f / x; }
#endif
}  // namespace kiln
