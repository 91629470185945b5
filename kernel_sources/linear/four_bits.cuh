// Codes of 4 bits as pairs of T, which is bf16 or fp16 and represents every value exactly.
//
// A word holds eight codes in the order of jit_kernels/ops/shared/four_bits.py: the codes 2 p and
// 2 p + 1 are in the bits 4 p and 4 p + 16. pairs() returns the pairs 0 to 3 of a word.
#pragma once
#include "kiln/ptx/pair.cuh"
#include "linear/operands.cuh"

namespace kiln {

// Two times the T whose lowest bit of the fraction is 1, with a fraction of 0: 128 or 1024.
template <class T> constexpr uint32_t kWholeBase = 0x43004300;
template <> constexpr uint32_t kWholeBase<fp16> = 0x64006400;

// Whole numbers from 0 to 15, minus a zero point from 0 to 16.
struct U4 {
  static constexpr int kElements = 32;  // of 16 bytes
  using Scale = float;
  // The zero point as pairs() takes it.
  template <class T> KILN_FN static uint32_t zero_pair(int zero) {
    return (kWholeBase<T> | 0x80008000) + uint32_t(zero) * 0x10001;
  }
  template <class T> KILN_FN static Pairs<4> pairs(uint32_t word, uint32_t zero_pair) {
    Pairs<4> to;
#pragma unroll
    for (int p = 0; p < 4; ++p)
      to.w[p] = add_pair<T>((word >> 4 * p & 0x000f000f) | kWholeBase<T>, zero_pair);
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
  template <class T> KILN_FN static uint32_t zero_pair(int) { return 0; }
  // Exponent and fraction where T has them give a T that is too small by 2^126 or 2^14.
  template <class T> KILN_FN static Pairs<4> pairs(uint32_t word, uint32_t) {
    constexpr bool kHalf = kWholeBase<T> == kWholeBase<fp16>;
    Pairs<4> to;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const uint32_t top = word << (12 - 4 * p);
      const uint32_t bits = (top & 0x70007000) >> (kHalf ? 3 : 6) | (top & 0x80008000);
      to.w[p] = mul_pair<T>(bits, kHalf ? 0x74007400 : 0x7e807e80);
    }
    return to;
  }
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int p, uint32_t) {
    return pairs<T>(from.w[p], 0);
  }
};

}  // namespace kiln
