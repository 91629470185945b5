// The codes of quantised weights as floats, and their scales.
#pragma once
#include "kiln/math/exact.cuh"

namespace kiln {

// 2^23 plus a whole number below 2^23: the number is the last bits of such a float.
KILN_FN float behind_2_23(uint32_t number) { return as_float(0x4b000000 | number); }

// value() subtracts the zero point, where there is one: origin() of it is the number for 0. Both
// are exact for zero points of 16 bits, in fewer instructions than the conversion of an integer.
struct U4 {
  static constexpr int kBits = 4;
  using Scale = float;
  KILN_FN static float origin(int zero) { return add_rn(float(zero), 0x1p23f); }
  KILN_FN static float value(uint32_t code, float origin) {
    return sub_rn(behind_2_23(code), origin);
  }
};
struct U8 : U4 {
  static constexpr int kBits = 8;
};
struct S8 : U8 {
  KILN_FN static float origin(int) { return 0x1p23f + 128; }
  KILN_FN static float value(uint32_t code, float origin) {
    return sub_rn(behind_2_23(code ^ 0x80), origin);
  }
};
struct E4M3 : U8 {
  KILN_FN static float origin(int) { return 0; }
  KILN_FN static float value(uint32_t code, float) { return to_float(e4m3{uint8_t(code)}); }
};
// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Its scales are powers
// of two, stored as their exponents plus 127. The bits, shifted to where a float has them, are the
// value times 2^-126, also for subnormals.
struct E2M1 {
  static constexpr int kBits = 4;
  using Scale = uint8_t;
  KILN_FN static float origin(int) { return 0; }
  KILN_FN static float value(uint32_t code, float) {
    return mul_rn(as_float((code & 8) << 28 | (code & 7) << 22), 0x1p126f);
  }
};

KILN_FN float scale_of(float scale) { return scale; }
KILN_FN float scale_of(uint8_t exponent) { return power_of_two(exponent); }

}  // namespace kiln
