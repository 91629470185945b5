// The gated activation behind a product: act(gate) * up of two sums of a block.
#pragma once
#include "kiln/math/activations.cuh"

namespace kiln {

// GATE = none means no activation. It must be a function, like those of activations.cuh.
KILN_FN float none(float x) { return x; }
template <float (*ACTIVATION)(float)> constexpr bool kGates = true;
template <> constexpr bool kGates<none> = false;

// Return act(gate) * up of two sums, each rounded to T first, as a product would store it.
template <class T, float (*ACTIVATION)(float)> KILN_FN float gated(float gate, float up) {
  T rounded[2];
  from_float(gate, rounded[0]);
  from_float(up, rounded[1]);
  return mul_rn(ACTIVATION(to_float(rounded[0])), to_float(rounded[1]));
}

}  // namespace kiln
