// Scales and zero points of 4-bit codes, for the groups of a chunk of 128 inputs of an output.
//
// They never change, so they are loaded early, like the codes. They are kept as they are stored
// until they are used: that takes fewer registers.
#pragma once
#include "kiln/ptx/early.cuh"
#include "linear/four_bits.cuh"

namespace kiln {

template <class Format, int N> struct Groups {
  struct alignas(N * 4) Floats { float scale[N]; };
  Floats own;
  short zero[N];

  // at: of the first group in scales and zeros. If zeros is null, the zero point is 8.
  KILN_FN void load(const float* scales, const short* zeros, int64_t at) {
    own = load_early_vector<Floats>(scales + at);
#pragma unroll
    for (int n = 0; n < N; ++n) zero[n] = zeros ? load_early_short(zeros + at + n) : short(8);
  }
  KILN_FN float scale(int n) const { return own.scale[n]; }
  template <class T> KILN_FN uint32_t zero_pair(int n) const {
    return Format::template zero_pair<T>(zero[n]);
  }
};

// Four exponents of two in a word, plus 127. There are no zero points.
template <> struct Groups<E2M1, 4> {
  struct Word { uint32_t octets; };
  Word own;

  KILN_FN void load(const uint8_t* scales, const short*, int64_t at) {
    own = load_early_vector<Word>(scales + at);
  }
  KILN_FN float scale(int n) const {  // 2^-127 is subnormal
    const uint32_t exponent = own.octets >> 8 * n & 0xff;
    return as_float(exponent ? exponent << 23 : 1u << 22);
  }
  template <class T> KILN_FN uint32_t zero_pair(int) const { return 0; }
};

}  // namespace kiln
