// Arithmetic on two 16-bit elements in one word.
#pragma once
#include "kiln/ptx/mma.cuh"

namespace kiln {

// Elementwise products, rounded once to T (bf16 or fp16); the same bits as on the host.
template <class T> KILN_FN uint32_t mul_pair(uint32_t a, uint32_t b);
// Elementwise sums, rounded once to T.
template <class T> KILN_FN uint32_t add_pair(uint32_t a, uint32_t b);
// Elementwise a * b + c, rounded once to T.
template <class T> KILN_FN uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c);
// Elementwise maximum of |a| and |b|. NaN is above all; the result's sign bits are undefined.
template <class T> KILN_FN uint32_t larger_pair(uint32_t a, uint32_t b);

#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// Make the compiler drop elements unpacked from the word: it keeps one register, not two.
KILN_FN void keep_packed(uint32_t& word) { asm volatile("" : "+r"(word)); }
// Make the compiler keep a pointer to global memory in registers: it would compute it again for
// each load.
template <class T> KILN_FN void keep_global(T*& p) {
  asm volatile("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
}
#else  // ---- host ------------------------------------------------------------------------------
KILN_FN void keep_packed(uint32_t&) {}
template <class T> KILN_FN void keep_global(T*&) {}
#endif

#if defined(KILN_ON_GPU) && __CUDA_ARCH__ >= 800  // ---- device ---------------------------------
template <> KILN_FN uint32_t fma_pair<bf16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
template <> KILN_FN uint32_t fma_pair<fp16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t y;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
  return y;
}
template <> KILN_FN uint32_t mul_pair<bf16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"  // plus -0; sm_80 has no mul.bf16x2
      : "=r"(y) : "r"(a), "r"(b), "r"(0x80008000));
  return y;
}
template <> KILN_FN uint32_t mul_pair<fp16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
template <> KILN_FN uint32_t add_pair<bf16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;"  // a times 1; sm_80 has no add.bf16x2
      : "=r"(y) : "r"(a), "r"(0x3f803f80), "r"(b));
  return y;
}
template <> KILN_FN uint32_t add_pair<fp16>(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
#define KILN_LARGER(T, kind)                                                                     \
  template <> KILN_FN uint32_t larger_pair<T>(uint32_t a, uint32_t b) {                          \
    uint32_t y;                                                                                  \
    asm(kind : "=r"(y) : "r"(a), "r"(b));                                                        \
    return y;                                                                                    \
  }
#if __CUDA_ARCH__ >= 860
KILN_LARGER(bf16, "max.NaN.xorsign.abs.bf16x2 %0, %1, %2;")
KILN_LARGER(fp16, "max.NaN.xorsign.abs.f16x2 %0, %1, %2;")
#else
#define KILN_ABS_MAX(kind)                                                                       \
  "{ .reg .b32 p, q; abs." kind " p, %1; abs." kind " q, %2; max.NaN." kind " %0, p, q; }"
KILN_LARGER(bf16, KILN_ABS_MAX("bf16x2"))
KILN_LARGER(fp16, KILN_ABS_MAX("f16x2"))
#undef KILN_ABS_MAX
#endif
#undef KILN_LARGER
#else  // ---- host, and sm_75, which has no bf16 arithmetic ------------------------------------
// Apply f to each half in float32, and round to T.
template <class T, class F> KILN_FN uint32_t by_half(uint32_t a, uint32_t b, F f) {
  return pack<T>(f(to_float(T{uint16_t(a)}), to_float(T{uint16_t(b)})),
                 f(to_float(T{uint16_t(a >> 16)}), to_float(T{uint16_t(b >> 16)})));
}
// A product is exact in float32, except below half of the smallest T: it is rounded once, too.
template <class T> KILN_FN uint32_t mul_pair(uint32_t a, uint32_t b) {
  return by_half<T>(a, b, [](float x, float y) { return mul_rn(x, y); });
}
// The product is exact in double, and so is the sum of numbers that are not far apart.
template <class T> KILN_FN uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  const auto one = [&](int shift) {
    const auto at = [&](uint32_t pair) { return double(to_float(T{uint16_t(pair >> shift)})); };
    return float(at(a) * at(b) + at(c));
  };
  return pack<T>(one(0), one(16));
}
// Rounding to float32 and then to T equals rounding once: float32 has over twice the digits of T.
template <class T> KILN_FN uint32_t add_pair(uint32_t a, uint32_t b) {
  return by_half<T>(a, b, [](float x, float y) { return add_rn(x, y); });
}
template <class T> KILN_FN uint32_t larger_pair(uint32_t a, uint32_t b) {
  const uint32_t lo = a & 0x7fff, hi = a & 0x7fff0000;
  const uint32_t low = b & 0x7fff, high = b & 0x7fff0000;
  return (hi > high ? hi : high) | (lo > low ? lo : low);
}
#endif
}  // namespace kiln
