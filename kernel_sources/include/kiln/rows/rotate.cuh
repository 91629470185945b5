// Rotation of pairs of numbers, with one order of operations for all kernels.
#pragma once
#include "kiln/rows/chunk.cuh"
#include "kiln/rows/vec.cuh"

namespace kiln {

// (a, b) rotated by the angle of cosine c and sine s. Each product is rounded on its own: if only
// some kernels contracted it to a fused multiply-add, their results would differ in the last bit.
KILN_FN float rotated_first(float a, float b, float c, float s) {
  return sub_rn(mul_rn(a, c), mul_rn(b, s));
}
KILN_FN float rotated_second(float a, float b, float c, float s) {
  return add_rn(mul_rn(b, c), mul_rn(a, s));
}

// Cosines and sines of N consecutive angles, in registers. N: a multiple of 4.
template <int N> struct CosSin {
  Vec<float> cosines[N / 4], sines[N / 4];

  KILN_FN void load(const float* c, const float* s) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      cosines[i] = Vec<float>::load(c + i * 4);
      sines[i] = Vec<float>::load(s + i * 4);
    }
  }
  // Rotate the pairs of a and b by the angles from `first` on. Word by word, because one
  // instruction converts two elements.
  template <class T> KILN_FN void rotate(Chunk<T>& a, Chunk<T>& b, int first) const {
    constexpr int kSize = Word<T>::kSize;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[kSize], y[kSize], p[kSize], q[kSize];
      Word<T>::unpack(a.word[i], x);
      Word<T>::unpack(b.word[i], y);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        const int angle = first + i * kSize + k;
        const float c = cosines[angle / 4].v[angle % 4], s = sines[angle / 4].v[angle % 4];
        p[k] = rotated_first(x[k], y[k], c, s);
        q[k] = rotated_second(x[k], y[k], c, s);
      }
      a.word[i] = Word<T>::packed(p);
      b.word[i] = Word<T>::packed(q);
    }
  }
};

}  // namespace kiln
