// Logits of attention: their units, the soft cap, and rows without a visible key.
#pragma once
#include "kiln/ptx/fast.cuh"
#include "kiln/math/reduce.cuh"

namespace kiln {

constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;

// How far, in log2 units, a row's top lies below its largest logit when weights are T: fp16 has few
// bits for small weights.
template <class T> constexpr float kLift = 0;
template <> inline constexpr float kLift<fp16> = 6;

// Offset to subtract from logits whose maximum is top: -infinity - -infinity would be NaN.
KILN_FN float finite(float top) { return top > minus_infinity() ? top : 0.0f; }

// Soft cap: cap tanh(x / cap), given z = 2 log2(e) x / cap. tanh = 1 - 2 / (2^z + 1) is never inf /
// inf. The quotient is computed through a logarithm: exact division takes many instructions.
KILN_FN float capped(float z, float cap) {
  return cap * (1.0f - exp2_fast(1.0f - log2_fast(exp2_fast(z) + 1.0f)));
}

}  // namespace kiln
