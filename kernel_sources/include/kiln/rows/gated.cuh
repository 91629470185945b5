// Gated activations: act(gate) * up in float, rounded once.
#pragma once
#include "kiln/math/activations.cuh"
#include "kiln/rows/chunk.cuh"

namespace kiln {

// act(gate) * up for words of packed elements; y may be gate or up.
template <class T, float (*ACTIVATION)(float), int N>
KILN_FN void act_and_mul(const uint32_t (&gate)[N], const uint32_t (&up)[N], uint32_t (&y)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    float g[Word<T>::kSize], u[Word<T>::kSize];
    Word<T>::unpack(gate[i], g);
    Word<T>::unpack(up[i], u);
#pragma unroll
    for (int k = 0; k < Word<T>::kSize; ++k) g[k] = mul_rn(ACTIVATION(g[k]), u[k]);
    y[i] = Word<T>::packed(g);
  }
}
template <class T, float (*ACTIVATION)(float)>
KILN_FN Chunk<T> act_and_mul(const Chunk<T>& gate, const Chunk<T>& up) {
  Chunk<T> result;
  act_and_mul<T, ACTIVATION>(gate.word, up.word, result.word);
  return result;
}

}  // namespace kiln
