// Approximate arithmetic in one instruction, by name: there is no fast-math switch. And exact
// arithmetic made of it, which holds in a range.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// 1 / x, at most one unit in the last place off; subnormals are taken for 0, on either side.
KILN_FN float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x and the square root of x rounded to nearest, as rcp_rn and sqrt_rn round them, for x from
// 2^-100 to 2^100: what those execute in their range, without the branch around the rest.
KILN_FN float rcp_rn_normal(float x) {
  const float y = reciprocal_fast(x);
  return fma_rn(y, -fma_rn(y, x, -1.0f), y);
}
KILN_FN float sqrt_rn_normal(float x) {
  float inverse;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  const float y = mul_rn(x, inverse);
  return fma_rn(fma_rn(-y, y, x), mul_rn(inverse, 0.5f), y);
}
#else  // ---- host ------------------------------------------------------------------------------
KILN_FN float reciprocal_fast(float x) { return 1.0f / x; }
KILN_FN float rcp_rn_normal(float x) { return 1.0f / x; }
KILN_FN float sqrt_rn_normal(float x) { return ::sqrtf(x); }
#endif
}  // namespace kiln
