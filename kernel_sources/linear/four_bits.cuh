// Codes of 4 bits as the pairs of T that mma instructions take; see kiln/math/four_bits.cuh.
#pragma once
#include "kiln/math/four_bits.cuh"
#include "linear/operands.cuh"

namespace kiln {

// Whole numbers from 0 to 15, minus a zero point from 0 to 16.
struct U4 {
  static constexpr int kElements = 32;  // of 16 bytes
  using Scale = float;
  template <class T> KILN_FN static float restore() { return kUnlift<T>; }
  template <class T> KILN_FN static uint32_t zero_pair(int zero) { return zero_pair_of<T>(zero); }
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int p, uint32_t zero_pair) {
    Pairs<4> to;
    unpack_u4<T>(from.w[p], zero_pair, to.w);
    return to;
  }
};

// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6. There is no zero point.
struct E2M1 {
  static constexpr int kElements = 32;
  using Scale = uint8_t;  // the exponent of a power of two, plus 127
  template <class T> KILN_FN static float restore() { return 1; }
  template <class T> KILN_FN static uint32_t zero_pair(int) { return 0; }
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int p, uint32_t) {
    Pairs<4> to;
    unpack_e2m1<T>(from.w[p], to.w);
    return to;
  }
};

}  // namespace kiln
