// Codes of 4 bits as pairs of T, which is bf16 or fp16 and represents every value exactly.
//
// jit_kernels/ops/shared/four_bits.py puts eight codes in a word: code 2 p begins at bit 4 p, and
// code 2 p + 1 at bit 4 p + 16. Together they become pair p, for p = 0 to 3.
#pragma once
#include "kiln/ptx/pair.cuh"

namespace kiln {

// The bits of a whole number below 16 are those of a subnormal T. The largest power of two lifts it
// to 2^-6 (bf16) or 2^-9 (fp16) times the number: one instruction multiplies and subtracts.
template <class T> constexpr uint32_t kLift = 0x7f007f00;
template <> constexpr uint32_t kLift<fp16> = 0x78007800;
template <class T> constexpr uint32_t kLift16th = 0x7d007d00;
template <> constexpr uint32_t kLift16th<fp16> = 0x68006800;
template <class T> constexpr float kUnlift = 64;  // what the results of unpack_u4 have to be times
template <> constexpr float kUnlift<fp16> = 512;

// A zero point from 0 to 16, as unpack_u4 takes it.
template <class T> KILN_FN uint32_t zero_pair_of(int zero) {
  return mul_pair<T>(uint32_t(zero) * 0x10001, kLift<T> | 0x80008000);
}
// Whole numbers from 0 to 15, minus a zero point, divided by kUnlift.
// Bits 4 to 7 of T stand for 16 times as much as bits 0 to 3, and are lifted by a 16th.
template <class T> KILN_FN void unpack_u4(uint32_t word, uint32_t zero_pair, uint32_t (&to)[4]) {
#pragma unroll
  for (int p = 0; p < 4; p += 2) {
    const uint32_t low = word >> 4 * p & 0x000f000f, high = word >> 4 * p & 0x00f000f0;
    to[p] = fma_pair<T>(low, kLift<T>, zero_pair);
    to[p + 1] = fma_pair<T>(high, kLift16th<T>, zero_pair);
  }
}

// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4, 6. Exponent and fraction
// where T has them give a T that is too small by 2^126 or 2^14.
template <class T> KILN_FN void unpack_e2m1(uint32_t word, uint32_t (&to)[4]) {
  constexpr bool kHalf = kLift<T> == kLift<fp16>;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const uint32_t top = word << (12 - 4 * p);
    const uint32_t bits = (top & 0x70007000) >> (kHalf ? 3 : 6) | (top & 0x80008000);
    to[p] = mul_pair<T>(bits, kHalf ? 0x74007400 : 0x7e807e80);
  }
}

}  // namespace kiln
