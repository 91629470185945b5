// 16 bytes of T, kept packed as four words: unpacked, each 16-bit element would take a register.
// Operations go word by word, so that few elements are unpacked at a time.
#pragma once
#include "kiln/ptx/pair.cuh"
#include "kiln/ptx/store.cuh"

namespace kiln {

// One word: two elements of 16 bits, or a float.
template <class T> struct Word {
  static constexpr int kSize = 2;
  KILN_FN static void unpack(uint32_t w, float (&x)[2]) {
    x[0] = to_float(T{uint16_t(w)});
    x[1] = to_float(T{uint16_t(w >> 16)});
  }
  KILN_FN static uint32_t packed(const float (&x)[2]) { return pack<T>(x[0], x[1]); }
  KILN_FN static uint32_t product(uint32_t a, uint32_t b) { return mul_pair<T>(a, b); }
  KILN_FN static uint32_t sum(uint32_t a, uint32_t b) { return add_pair<T>(a, b); }
  KILN_FN static uint32_t bits(T x) { return x.bits; }
  KILN_FN static T first(uint32_t w) { return {uint16_t(w)}; }
};
template <> struct Word<float> {
  static constexpr int kSize = 1;
  KILN_FN static void unpack(uint32_t w, float (&x)[1]) { x[0] = as_float(w); }
  KILN_FN static uint32_t packed(const float (&x)[1]) { return as_uint(x[0]); }
  KILN_FN static uint32_t product(uint32_t a, uint32_t b) {
    return as_uint(mul_rn(as_float(a), as_float(b)));
  }
  KILN_FN static uint32_t sum(uint32_t a, uint32_t b) {
    return as_uint(add_rn(as_float(a), as_float(b)));
  }
  KILN_FN static uint32_t bits(float x) { return as_uint(x); }
  KILN_FN static float first(uint32_t w) { return as_float(w); }
};

template <class T> struct alignas(16) Chunk {
  static constexpr int kSize = 16 / sizeof(T);
  uint32_t word[4];

  KILN_FN static Chunk load(const T* p) { return load_vector<Chunk>(p); }
  KILN_FN void store(T* p) const { store_words(p, word); }

  KILN_FN void keep_packed() {
#pragma unroll
    for (int i = 0; i < 4; ++i) kiln::keep_packed(word[i]);
  }
};

// Sum, rounded to T.
template <class T> KILN_FN Chunk<T> add(const Chunk<T>& a, const Chunk<T>& b) {
  Chunk<T> sum;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum.word[i] = Word<T>::sum(a.word[i], b.word[i]);
  return sum;
}

}  // namespace kiln
