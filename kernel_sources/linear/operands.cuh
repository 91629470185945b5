// What a lane multiplies: 16 bytes of a row, as pairs of T that an mma takes.
//
// With g = lane / 4 and t = lane % 4, a lane loads 16 neighbouring bytes of row g, the t-th of 64,
// and multiplies them in one mma after the other. So the inputs have another order in an mma than
// in memory, the same for weights and x.
#pragma once
#include "kiln/ptx/early.cuh"
#include "kiln/ptx/fp8.cuh"

namespace kiln {

struct alignas(16) Words { uint32_t w[4]; };

// N pairs of neighbouring elements.
template <int N> struct Pairs { uint32_t w[N]; };

// Elements of T itself.
struct Plain {
  static constexpr int kElements = 8;  // of 16 bytes
  template <class T> KILN_FN static Pairs<4> pairs(const Words& from) {
    return {{from.w[0], from.w[1], from.w[2], from.w[3]}};
  }
};

// Codes of 8 bits, which are exact as T.
struct E4M3 {
  static constexpr int kElements = 16;
  template <class T> KILN_FN static Pairs<8> pairs(const Words& from) {
    Pairs<8> to;
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack_e4m3<T>(from.w[i], to.w[2 * i], to.w[2 * i + 1]);
    return to;
  }
};

// Load the first `left` of 8 elements from p on; the others are zeros. It is rarely called, and so
// not inlined: less code compiles faster.
template <class T> KILN_NOINLINE Words words_of(const T* p, int left) {
  Words words{};
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (j < left) words.w[j / 2] |= uint32_t(p[j].bits) << j % 2 * 16;
  return words;
}

}  // namespace kiln
