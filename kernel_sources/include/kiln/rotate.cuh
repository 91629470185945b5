// The rotation of a pair of numbers, in one order of operations for every kernel that does it.
#pragma once
#include "kiln/vec.cuh"

namespace kiln {

// (a, b) turned by an angle of cosine c and sine s. Each product is rounded on its own: contracted
// to a fused multiply-add here and not there, two kernels would differ in the last bit.
KILN_FN float turned_first(float a, float b, float c, float s) {
  return sub_rn(mul_rn(a, c), mul_rn(b, s));
}
KILN_FN float turned_second(float a, float b, float c, float s) {
  return add_rn(mul_rn(b, c), mul_rn(a, s));
}

// Cosines and sines of N neighbouring angles, in registers. N is a multiple of 4.
template <int N> struct Turn {
  Vec<float> cosines[N / 4], sines[N / 4];

  KILN_FN void load(const float* c, const float* s) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      cosines[i] = Vec<float>::load(c + i * 4);
      sines[i] = Vec<float>::load(s + i * 4);
    }
  }
  template <class T> KILN_FN void pair(T& a, T& b, int i) const {
    const float x = to_float(a), y = to_float(b);
    const float c = cosines[i / 4].v[i % 4], s = sines[i / 4].v[i % 4];
    from_float(turned_first(x, y, c, s), a);
    from_float(turned_second(x, y, c, s), b);
  }
};

}  // namespace kiln
