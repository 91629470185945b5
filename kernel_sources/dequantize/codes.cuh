// The codes of quantised weights as floats, and their scales.
#pragma once
#include "kiln/math/exact.cuh"

namespace kiln {

// value() subtracts the zero point, where there is one.
struct U4 {
  static constexpr int kBits = 4;
  using Scale = float;
  KILN_FN static float value(uint32_t code, int zero) { return float(int(code) - zero); }
};
struct U8 : U4 {
  static constexpr int kBits = 8;
};
struct S8 : U8 {
  KILN_FN static float value(uint32_t code, int) { return float(int8_t(code)); }
};
struct E4M3 : U8 {
  KILN_FN static float value(uint32_t code, int) {
    return to_float(e4m3{uint8_t(code)});
  }
};
// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Its scales are powers
// of two, stored as their exponents plus 127.
struct E2M1 {
  static constexpr int kBits = 4;
  using Scale = uint8_t;
  KILN_FN static float value(uint32_t code, int) {
    const int exponent = code >> 1 & 3, fraction = code & 1;
    const int twice = exponent ? (2 + fraction) << (exponent - 1) : fraction;
    return float(code & 8 ? -twice : twice) * 0.5f;
  }
};

KILN_FN float scale_of(float scale) { return scale; }
KILN_FN float scale_of(uint8_t exponent) { return power_of_two(exponent); }

}  // namespace kiln
