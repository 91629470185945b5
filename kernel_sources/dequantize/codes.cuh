// The codes of quantised weights as floats, and their scales.
#pragma once
#include "kiln/math/exact.cuh"

namespace kiln {

// 2^23 + number, for a whole number below 2^23: its bits are the last bits of that float.
KILN_FN float plus_2_23(uint32_t number) { return as_float(0x4b000000 | number); }

// origin() returns what value() subtracts: for whole numbers, 2^23 plus the zero point, from 2^23
// plus the code. Both are exact for zero points of 16 bits. This takes fewer instructions than
// converting integers to floats.
struct U4 {
  static constexpr int kBits = 4;
  using Scale = float;
  KILN_FN static float origin(int zero) { return add_rn(float(zero), 0x1p23f); }
  KILN_FN static float value(uint32_t code, float origin) {
    return sub_rn(plus_2_23(code), origin);
  }
};
struct U8 : U4 {
  static constexpr int kBits = 8;
};
struct S8 : U8 {
  KILN_FN static float origin(int) { return 0x1p23f + 128; }
  KILN_FN static float value(uint32_t code, float origin) {
    return sub_rn(plus_2_23(code ^ 0x80), origin);
  }
};
struct E4M3 : U8 {
  KILN_FN static float origin(int) { return 0; }
  KILN_FN static float value(uint32_t code, float) { return to_float(e4m3{uint8_t(code)}); }
};
// 1 bit of sign, 2 of exponent, 1 of fraction: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. Its scales are powers
// of two, stored as their exponents plus 127. If the bits are moved to the places of sign, exponent
// and fraction in a float, that float is the value times 2^-126; so it is for the subnormal 0.5.
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
