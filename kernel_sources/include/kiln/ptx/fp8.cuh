// Conversions of four e4m3 at once, for quantisation and for fp8 KV pools.
#pragma once
#include "kiln/ptx/mma.cuh"

namespace kiln {

// Convert four floats to e4m3, rounded as by from_float(x, e4m3&); x0 is in the lowest byte.
KILN_FN uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
#if defined(KILN_ON_GPU) && __CUDA_ARCH__ >= 890
  uint16_t lo, hi;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x1), "f"(x0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x3), "f"(x2));
  return uint32_t(hi) << 16 | lo;
#else
  const float x[4] = {x0, x1, x2, x3};
  uint32_t r = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    e4m3 y;
    from_float(x[i], y);
    r |= uint32_t(y.bits) << 8 * i;
  }
  return r;
#endif
}

// Swap the two middle bytes.
KILN_FN uint32_t swap_middle_bytes(uint32_t four) {
#ifdef KILN_ON_GPU
  return __byte_perm(four, 0, 0x3120);
#else
  return (four & 0xff0000ff) | (four >> 8 & 0xff00) | (four << 8 & 0xff0000);
#endif
}

// Convert four e4m3 to pairs of T, exactly: bytes 0 and 1 in lo, 2 and 3 in hi. NaN becomes 0x7fff.
template <class T> KILN_FN void unpack_e4m3(uint32_t four, uint32_t& lo, uint32_t& hi);
// Whether that takes more than one instruction per pair. Loops over it are then best not unrolled.
#if defined(KILN_ON_GPU) && __CUDA_ARCH__ < 890
constexpr bool kLongUnpack = true;
#else
constexpr bool kLongUnpack = false;
#endif

#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
#if __CUDA_ARCH__ >= 890
template <> KILN_FN void unpack_e4m3<fp16>(uint32_t four, uint32_t& lo, uint32_t& hi) {
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(lo) : "h"(uint16_t(four)));
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(hi) : "h"(uint16_t(four >> 16)));
}
template <> KILN_FN void unpack_e4m3<bf16>(uint32_t four, uint32_t& lo, uint32_t& hi) {
  uint32_t pair[2];
  unpack_e4m3<fp16>(four, pair[0], pair[1]);
  lo = pack<bf16>(to_float(fp16{uint16_t(pair[0])}), to_float(fp16{uint16_t(pair[0] >> 16)}));
  hi = pack<bf16>(to_float(fp16{uint16_t(pair[1])}), to_float(fp16{uint16_t(pair[1] >> 16)}));
}
#else
// Without the instruction: a shift turns a byte in the upper half of 16 bits into a T with a wrong
// exponent. A multiplication by a power of two corrects it, also for subnormals. canonical() then
// restores the sign and NaN.
KILN_FN uint32_t canonical(uint32_t bytes, uint32_t scaled) {
  const uint32_t nan = ((bytes & 0x7f007f00) + 0x01000100) & 0x80008000;
  return ((scaled | (bytes & 0x80008000)) & ~nan) | (nan - (nan >> 15));
}
template <> KILN_FN void unpack_e4m3<fp16>(uint32_t four, uint32_t& lo, uint32_t& hi) {
  uint32_t bytes[2] = {__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)}, r[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("mul.rn.f16x2 %0, %1, %2;"  // times 2^8
        : "=r"(r[i]) : "r"((bytes[i] & 0x7f007f00) >> 1), "r"(0x5c005c00));
    r[i] = canonical(bytes[i], r[i]);
  }
  lo = r[0];
  hi = r[1];
}
template <> KILN_FN void unpack_e4m3<bf16>(uint32_t four, uint32_t& lo, uint32_t& hi) {
  uint32_t bytes[2] = {__byte_perm(four, 0, 0x1404), __byte_perm(four, 0, 0x3424)}, r[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"  // times 2^120; sm_80 has no mul.bf16x2
        : "=r"(r[i]) : "r"((bytes[i] & 0x7f007f00) >> 4), "r"(0x7b807b80), "r"(0x80008000));
    r[i] = canonical(bytes[i], r[i]);
  }
  lo = r[0];
  hi = r[1];
}
#endif

#else  // ---- host ------------------------------------------------------------------------------
template <class T> KILN_FN void unpack_e4m3(uint32_t four, uint32_t& lo, uint32_t& hi) {
  float x[4];
  for (int i = 0; i < 4; ++i) x[i] = to_float(e4m3{uint8_t(four >> 8 * i)});
  lo = pack<T>(x[0], x[1]);
  hi = pack<T>(x[2], x[3]);
}
#endif
}  // namespace kiln
