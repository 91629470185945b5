// What a lane multiplies: 16 bytes of a row, as the pairs of T that mma instructions take.
//
// Four neighbouring lanes share a row. Lane 4 g + t loads the t-th 16 bytes of 64 bytes of row g,
// and passes its elements to one mma after the other, a few to each. The order of the inputs within
// an mma is therefore not that of memory. But it is the same for the weights and for x, so the sum
// of products has the same terms. The formats with two codes in a byte are in four_bits.cuh.
#pragma once
#include "kiln/ptx/early.cuh"
#include "kiln/ptx/fp8.cuh"
#include "kiln/ptx/int8.cuh"
#include "kiln/rows/words.cuh"

namespace kiln {

// N pairs of neighbouring elements.
template <int N> struct Pairs { uint32_t w[N]; };

// A format has `kElements` in 16 bytes, and takes them in pieces of eight, two mma for each. The
// sums of products are multiplied by restore(). What has no zero point ignores it.

// The members that all formats without zero points share.
struct WithoutZeros {
  using Scale = float;
  template <class T> KILN_FN static float restore() { return 1; }
  template <class T> KILN_FN static uint32_t zero_pair(int) { return 0; }
};

// Elements that are stored as T.
struct Plain : WithoutZeros {
  static constexpr int kElements = 8;
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int, uint32_t) {
    return {{from.w[0], from.w[1], from.w[2], from.w[3]}};
  }
};

// 8-bit floats. T, which is bf16 or fp16, can represent every one of them exactly.
struct E4M3 : WithoutZeros {
  static constexpr int kElements = 16;
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int p, uint32_t) {
    Pairs<4> to;
    unpack_e4m3<T>(from.w[2 * p], to.w[0], to.w[1]);
    unpack_e4m3<T>(from.w[2 * p + 1], to.w[2], to.w[3]);
    return to;
  }
};

// Integers from -128 to 127 in 8 bits. T is bf16 or fp16, and represents each of them exactly.
struct I8 : WithoutZeros {
  static constexpr int kElements = 16;
  template <class T> KILN_FN static Pairs<4> piece(const Words& from, int p, uint32_t) {
    Pairs<4> to;
    unpack_int8<T>(from.w[2 * p], to.w[0], to.w[1]);
    unpack_int8<T>(from.w[2 * p + 1], to.w[2], to.w[3]);
    return to;
  }
};

}  // namespace kiln
