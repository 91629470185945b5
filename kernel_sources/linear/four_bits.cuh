// Codes of 4 bits as the pairs of T that mma instructions take; see kiln/math/four_bits.cuh.
#pragma once
#include "kiln/math/four_bits.cuh"
#include "linear/operands.cuh"

namespace kiln {

// Whole numbers from 0 to 15, minus a zero point from 0 to 16.
struct U4 {
  // The zero point as pairs() takes it.
  template <class T> KILN_FN static uint32_t zero_pair(int zero) { return zero_pair_of<T>(zero); }
  template <class T> KILN_FN static Pairs<4> pairs(uint32_t word, uint32_t zero_pair) {
    Pairs<4> to;
    unpack_u4<T>(word, zero_pair, to.w);
    return to;
  }
};

// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6. There is no zero point.
struct E2M1 {
  template <class T> KILN_FN static uint32_t zero_pair(int) { return 0; }
  template <class T> KILN_FN static Pairs<4> pairs(uint32_t word, uint32_t) {
    Pairs<4> to;
    unpack_e2m1<T>(word, to.w);
    return to;
  }
};

}  // namespace kiln
