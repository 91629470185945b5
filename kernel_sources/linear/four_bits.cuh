// Codes of 4 bits as pairs of T, which is bf16 or fp16 and represents every value exactly.
//
// A word holds eight codes in the order of jit_kernels/ops/shared/four_bits.py: the codes 2 p and
// 2 p + 1 are in the bits 4 p and 4 p + 16. pairs() returns the pairs 0 to 3 of a word; times
// restore<T>(), a power of two, they are the values of the codes.
#pragma once
#include "kiln/ptx/pair.cuh"
#include "linear/operands.cuh"

namespace kiln {

template <class T> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<fp16> = true;

// Whole numbers from 0 to 15, minus a zero point from 0 to 16. The bits of a whole number are those
// of a subnormal T, which the largest power of two lifts to 2^-6 (bf16) or 2^-9 (fp16) times it.
struct U4 {
  static constexpr int kElements = 32;  // of 16 bytes
  using Scale = float;
  template <class T> static constexpr uint32_t kLift = kIsHalf<T> ? 0x78007800 : 0x7f007f00;

  template <class T> KILN_FN static float restore() { return kIsHalf<T> ? 512.0f : 64.0f; }
  // The zero point as pairs() takes it.
  template <class T> KILN_FN static uint32_t zero_pair(int zero) {
    return mul_pair<T>(uint32_t(zero) * 0x10001, kLift<T> | 0x80008000);
  }
  template <class T> KILN_FN static Pairs<4> pairs(uint32_t word, uint32_t zero_pair) {
    Pairs<4> to;
#pragma unroll
    for (int p = 0; p < 4; ++p)
      to.w[p] = fma_pair<T>(word >> 4 * p & 0x000f000f, kLift<T>, zero_pair);
    return to;
  }
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int p, uint32_t zero_pair) {
    return pairs<T>(from.w[p], zero_pair);
  }
};

// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6. There is no zero point.
struct E2M1 {
  static constexpr int kElements = 32;
  using Scale = uint8_t;  // the exponent of a power of two, plus 127
  template <class T> KILN_FN static float restore() { return 1; }
  template <class T> KILN_FN static uint32_t zero_pair(int) { return 0; }
  // Exponent and fraction where T has them give a T that is too small by 2^126 or 2^14.
  template <class T> KILN_FN static Pairs<4> pairs(uint32_t word, uint32_t) {
    Pairs<4> to;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t top = word << (12 - 4 * p);
      const uint32_t bits = (top & 0x70007000) >> (kIsHalf<T> ? 3 : 6) | (top & 0x80008000);
      to.w[p] = mul_pair<T>(bits, kIsHalf<T> ? 0x74007400 : 0x7e807e80);
    }
    return to;
  }
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int p, uint32_t) {
    return pairs<T>(from.w[p], 0);
  }
};

}  // namespace kiln
