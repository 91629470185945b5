// Whole numbers of 8 bits as pairs of T, which is bf16 or fp16 and represents every one exactly.
#pragma once
#include "kiln/ptx/pair.cuh"

namespace kiln {

// With this as its upper byte and x as its lower byte, a bf16 is 128 + x (for x below 128), and an
// fp16 is 1024 + x.
template <class T> constexpr uint32_t kOnes = 0x43434343;
template <> constexpr uint32_t kOnes<fp16> = 0x64646464;

// Return bytes 0 and 1 of `four`, or 2 and 3, each as the lower byte of a T behind kOnes.
template <class T> KILN_FN uint32_t below_ones(uint32_t four, bool upper) {
#ifdef KILN_ON_GPU
  return __byte_perm(four, kOnes<T>, upper ? 0x4342 : 0x4140);
#else
  const uint32_t two = upper ? four >> 16 : four & 0xffff;
  return (two & 0xff) | (two & 0xff00) << 8 | (kOnes<T> & 0xff00ff00);
#endif
}

// Convert four int8 to pairs of T: bytes 0 and 1 in lo, 2 and 3 in hi. The lower 7 bits
// of an int8 count as they stand, and its highest bit counts as -128.
template <class T> KILN_FN void unpack_int8(uint32_t four, uint32_t& lo, uint32_t& hi) {
  constexpr uint32_t kMinusOne = kOnes<T> == kOnes<fp16> ? 0xbc00bc00 : 0xbf80bf80;
  const uint32_t low = below_ones<T>(four, false), high = below_ones<T>(four, true);
  lo = fma_pair<T>(low & 0xff80ff80, kMinusOne, low & 0xff7fff7f);
  hi = fma_pair<T>(high & 0xff80ff80, kMinusOne, high & 0xff7fff7f);
}

}  // namespace kiln
