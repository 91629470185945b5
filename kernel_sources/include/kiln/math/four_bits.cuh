// Codes of 4 bits as pairs of T, which is bf16 or fp16 and represents every value exactly.
//
// A word holds eight codes in the order of jit_kernels/ops/shared/four_bits.py: the codes 2 p and
// 2 p + 1 are in the bits 4 p and 4 p + 16. They become the pair p.
#pragma once
#include "kiln/ptx/pair.cuh"

namespace kiln {

// Two times the T whose lowest bit of the fraction is worth 1: 128 or 1024.
template <class T> constexpr uint32_t kWholeBase = 0x43004300;
template <> constexpr uint32_t kWholeBase<fp16> = 0x64006400;

// A zero point from 0 to 16, as unpack_u4 takes it.
template <class T> KILN_FN uint32_t zero_pair_of(int zero) {
  return (kWholeBase<T> | 0x80008000) + uint32_t(zero) * 0x10001;
}
// Whole numbers from 0 to 15, minus a zero point.
template <class T> KILN_FN void unpack_u4(uint32_t word, uint32_t zero_pair, uint32_t (&to)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p)
    to[p] = add_pair<T>((word >> 4 * p & 0x000f000f) | kWholeBase<T>, zero_pair);
}

// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Exponent and fraction
// where T has them give a T that is too small by 2^126 or 2^14.
template <class T> KILN_FN void unpack_e2m1(uint32_t word, uint32_t (&to)[4]) {
  constexpr bool kHalf = kWholeBase<T> == kWholeBase<fp16>;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t top = word << (12 - 4 * p);
    const uint32_t bits = (top & 0x70007000) >> (kHalf ? 3 : 6) | (top & 0x80008000);
    to[p] = mul_pair<T>(bits, kHalf ? 0x74007400 : 0x7e807e80);
  }
}

}  // namespace kiln
