// What a lane multiplies: 16 bytes of a row, as the pairs of T that mma instructions take.
//
// Four neighbouring lanes share a row. Lane 4 g + t loads the t-th 16 bytes of 64 bytes of row g,
// and passes its elements to one mma after the other, a few to each. The order of the inputs within
// an mma is therefore not that of memory. It is the same for the weights and for x, which is all
// that a sum of products needs.
#pragma once
#include "kiln/ptx/early.cuh"
#include "kiln/ptx/fp8.cuh"
#include "kiln/rows/words.cuh"

namespace kiln {

// N pairs of neighbouring elements.
template <int N> struct Pairs { uint32_t w[N]; };

// Elements that are stored as T.
struct Plain {
  static constexpr int kElements = 8;  // of 16 bytes
  template <class T> KILN_FN static Pairs<4> pairs(const Words& from) {
    return {{from.w[0], from.w[1], from.w[2], from.w[3]}};
  }
};

// 8-bit floats. T, which is bf16 or fp16, can represent every one of them exactly.
struct E4M3 {
  static constexpr int kElements = 16;
  template <class T> KILN_FN static Pairs<8> pairs(const Words& from) {
    Pairs<8> to;
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack_e4m3<T>(from.w[i], to.w[2 * i], to.w[2 * i + 1]);
    return to;
  }
};

}  // namespace kiln
