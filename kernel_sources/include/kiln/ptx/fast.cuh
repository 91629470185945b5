// Approximate arithmetic in one instruction, chosen by name because fast-math is never on. Also
// correctly rounded arithmetic made of it, valid in a limited range.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// 1 / x, within one unit in the last place; subnormal inputs and results count as 0.
KILN_FN float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x and sqrt(x), rounded to nearest like rcp_rn and sqrt_rn, for x from 2^-100 to 2^100. The
// same instructions as theirs, without their branch for other x.
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
