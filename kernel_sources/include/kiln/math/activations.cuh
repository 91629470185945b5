// Activations in float.
#pragma once
#include "kiln/ptx/fast.cuh"

namespace kiln {

// 1 / (1 + exp(-x)); absolute error below 3e-7. If exp(-x) overflows, the result is 0.
KILN_FN float sigmoid(float x) {
  return reciprocal_fast(add_rn(1.0f, exp2_fast(mul_rn(x, -1.4426950408889634f))));
}

// As in torch.nn.functional: silu; gelu with approximate="tanh", where (1 + tanh(u)) / 2 =
// sigmoid(2u); and gelu.
KILN_FN float silu(float x) { return mul_rn(x, sigmoid(x)); }
KILN_FN float gelu_tanh(float x) {
  const float cube = mul_rn(mul_rn(x, x), x);
  return mul_rn(x, sigmoid(mul_rn(1.5957691216057308f, fma_rn(0.044715f, cube, x))));
}

// x * P(x), where P is the normal distribution function; for x > 0, P(x) = 1 - P(-x). A polynomial
// is fitted to log2 P(-|x|) where |x| P >= 1e-8; beyond, it keeps falling. The error is below
// 6e-7 * max(|x|, 1). This takes a third of the instructions of erff.
KILN_FN float gelu(float x) {
  const float a = as_float(as_uint(x) & 0x7fffffff);
  float log2_p = -4.7329371716021604e-4f;
  log2_p = fma_rn(log2_p, a, 7.084459219894639e-3f);
  log2_p = fma_rn(log2_p, a, -5.18271641213375e-2f);
  log2_p = fma_rn(log2_p, a, -0.4599926494638426f);
  log2_p = fma_rn(log2_p, a, -1.1507877686162769f);
  log2_p = fma_rn(log2_p, a, -1.000037632426194f);
  const float p = exp2_fast(log2_p);
  return mul_rn(x, x > 0.0f ? sub_rn(1.0f, p) : p);
}

}  // namespace kiln
