// Scales and zero points of 4-bit codes, for the groups of a chunk of 128 inputs of an output.
//
// They never change, so they are loaded early, like the codes. They are kept as they are stored
// until they are used: that takes fewer registers.
#pragma once
#include "kiln/math/exact.cuh"
#include "kiln/ptx/early.cuh"
#include "linear/four_bits.cuh"

namespace kiln {

template <class Format, int N> struct Groups {
  uint32_t scales[N] = {};
  short zero[N] = {};

  // at: of the first group in scales and zeros. If zeros is null, the zero point is 8. Nothing is
  // loaded unless `wanted`.
  KILN_FN void load(const float* from, const short* zeros, int64_t at, bool wanted) {
    load_early_if(wanted, scales, from + at);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      zero[n] = 8;
      load_early_if(wanted && zeros, zero[n], zeros + at + n);
    }
  }
  KILN_FN float scale(int n) const { return as_float(scales[n]); }
  template <class T> KILN_FN uint32_t zero_pair(int n) const {
    return Format::template zero_pair<T>(zero[n]);
  }
};

// Four exponents of two in a word, plus 127. There are no zero points.
template <> struct Groups<E2M1, 4> {
  uint32_t octets[1] = {};

  KILN_FN void load(const uint8_t* from, const short*, int64_t at, bool wanted) {
    load_early_if(wanted, octets, from + at);
  }
  KILN_FN float scale(int n) const { return power_of_two(octets[0] >> 8 * n & 0xff); }
  template <class T> KILN_FN uint32_t zero_pair(int) const { return 0; }
};

}  // namespace kiln
