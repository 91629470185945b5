// What all attention does with logits: their units, their cap, and rows that see no key.
#pragma once
#include "kiln/ptx/fast.cuh"
#include "kiln/math/reduce.cuh"

namespace kiln {

constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;

// How far a row's top is set below its greatest logit, for weights that are multiplied as T: fp16
// has few bits for small ones.
template <class T> constexpr float kLift = 0;
template <> inline constexpr float kLift<fp16> = 6;

// What to subtract from logits whose greatest is top: -infinity - -infinity would be NaN.
KILN_FN float finite(float top) { return top > minus_infinity() ? top : 0.0f; }

// cap tanh(x / cap), of z = 2 log2(e) x / cap: tanh = 1 - 2 / (2^z + 1) is never inf / inf. The
// quotient by way of a logarithm, for an exact one is a long way round.
KILN_FN float capped(float z, float cap) {
  return cap * (1.0f - exp2_fast(1.0f - log2_fast(exp2_fast(z) + 1.0f)));
}

}  // namespace kiln
