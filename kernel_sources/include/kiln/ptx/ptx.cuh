// Types, conversions, vectors and exact arithmetic, with device and host bodies side by side. Only
// this folder holds asm and compiler switches: NVRTC compiles the device bodies, g++ and clang the
// host bodies. async: copies to shared memory. mma, wgmma: tensor cores. memory: ordered accesses.
// store: wide stores. fast: approximate arithmetic. pair: two elements in a word. warp: reductions.
// fp8: four e4m3 at once. launch: dependent launches. cluster: clusters. clock: limits on waiting.
#pragma once

#ifdef __CUDACC_RTC__  // ---- device ------------------------------------------------------------
#define KILN_ON_GPU
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int8_t = signed char;
using int32_t = int;
using int64_t = long long;
#define KILN_FN __device__ __forceinline__
#define KILN_NOINLINE __device__ __noinline__

namespace kiln {
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };

KILN_FN uint32_t as_uint(float x) { return __float_as_uint(x); }
KILN_FN float as_float(uint32_t x) { return __uint_as_float(x); }

// Rounded once to nearest even and never contracted: the same bits as on the host.
KILN_FN float add_rn(float a, float b) { return __fadd_rn(a, b); }
KILN_FN float sub_rn(float a, float b) { return __fsub_rn(a, b); }
KILN_FN float mul_rn(float a, float b) { return __fmul_rn(a, b); }
KILN_FN float div_rn(float a, float b) { return __fdiv_rn(a, b); }
KILN_FN float rcp_rn(float a) { return __frcp_rn(a); }  // 1 / a, in fewer instructions
KILN_FN float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
KILN_FN float sqrt_rn(float a) { return __fsqrt_rn(a); }
// The nearest integer, ties to even. NaN gives 0; values out of range saturate.
KILN_FN int32_t to_int_rn(float x) {
  int32_t y;
  asm("cvt.rni.s32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

// A few units in the last place off; subnormals count as 0. math/exact.cuh has an exact 2^x.
KILN_FN float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
KILN_FN float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

KILN_FN float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
KILN_FN void from_float(float x, fp16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

// sm_75 has no bf16 conversion: round to nearest even in integers, as the host body does.
KILN_FN void from_float(float x, bf16& y) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t u = as_uint(x);
  y.bits = x != x ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
#endif
}

// The block's dynamic shared memory, 16-byte aligned.
KILN_FN unsigned char* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char kiln_dynamic_shared[];
  return kiln_dynamic_shared;
}

// One memory access of sizeof(V) bytes; see store.cuh for stores to global memory.
template <class V> KILN_FN V load_vector(const void* p) { return *static_cast<const V*>(p); }
template <class V> KILN_FN void store_vector(void* p, const V& v) { *static_cast<V*>(p) = v; }
}  // namespace kiln

#else  // ---- host ------------------------------------------------------------------------------
#include "cuda_host.h"
#define KILN_FN inline
#define KILN_NOINLINE __attribute__((noinline)) static

namespace kiln {
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };
struct e4m3 { uint8_t bits; };

KILN_FN uint32_t as_uint(float x) { return uint32_t(cuda_host::bits(x)); }
KILN_FN float as_float(uint32_t x) { return cuda_host::unbits<float>(x); }

KILN_FN float add_rn(float a, float b) { return a + b; }  // compiled without contraction
KILN_FN float sub_rn(float a, float b) { return a - b; }
KILN_FN float mul_rn(float a, float b) { return a * b; }
KILN_FN float div_rn(float a, float b) { return a / b; }
KILN_FN float rcp_rn(float a) { return 1.0f / a; }
KILN_FN float fma_rn(float a, float b, float c) { return ::fmaf(a, b, c); }
KILN_FN float sqrt_rn(float a) { return ::sqrtf(a); }
KILN_FN int32_t to_int_rn(float x) {
  if (x != x) return 0;
  if (x >= 0x1p31f) return 0x7fffffff;
  return x < -0x1p31f ? -0x7fffffff - 1 : int32_t(::nearbyintf(x));
}

KILN_FN float exp2_fast(float x) { return ::exp2f(x); }
KILN_FN float log2_fast(float x) { return ::log2f(x); }

KILN_FN float to_float(fp16 x) {
  const uint32_t e = x.bits >> 10 & 31, m = x.bits & 1023, s = uint32_t(x.bits & 0x8000) << 16;
  if (e == 31) return as_float(s | 0x7f800000 | m << 13);
  if (e) return as_float(s | (e + 112) << 23 | m << 13);
  return as_float(s | as_uint(float(m) * 0x1p-24f));
}
KILN_FN void from_float(float x, fp16& y) {
  const uint32_t u = as_uint(x), s = u >> 16 & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) y.bits = 0x7fff;
  else if (a >= 0x477ff000) y.bits = uint16_t(s | 0x7c00);
  else if (a < 0x38800000) y.bits = uint16_t(s | uint32_t(::nearbyintf(as_float(a) * 0x1p24f)));
  else y.bits = uint16_t(s | (a - 0x38000000 + 0xfff + (a >> 13 & 1)) >> 13);
}
KILN_FN void from_float(float x, bf16& y) {
  const uint32_t u = as_uint(x);
  y.bits = x != x ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

KILN_FN unsigned char* dynamic_shared() {
  return static_cast<unsigned char*>(cuda_host::dynamic_shared());
}
template <class V> KILN_FN V load_vector(const void* p) { return cuda_host::load_vector<V>(p); }
template <class V> KILN_FN void store_vector(void* p, const V& v) { cuda_host::store_vector(p, v); }
}  // namespace kiln
#endif

namespace kiln {
KILN_FN float minus_infinity() { return as_float(0xff800000u); }
KILN_FN float to_float(float x) { return x; }
KILN_FN float to_float(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
KILN_FN void from_float(float x, float& y) { y = x; }

// e4m3: 4 exponent bits, no infinity, largest value +-448, NaN 0x7f and 0xff. Its bits, shifted to
// where a float has them, times 2^(127 - 7) are its value, also for subnormals.
KILN_FN float to_float(e4m3 x) {
  const uint32_t a = x.bits & 0x7f;
  const float y = mul_rn(as_float(uint32_t(x.bits & 0x80) << 24 | a << 20), 0x1p120f);
  return a == 0x7f ? as_float(0x7fffffff) : y;
}
// Round to nearest even. Magnitudes beyond 448 become 448, NaN becomes 0x7f.
KILN_FN void from_float(float x, e4m3& y) {
#if defined(KILN_ON_GPU) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  y.bits = uint8_t(pair);
#else
  const uint32_t u = as_uint(x), s = u >> 24 & 0x80, a = u & 0x7fffffff;
  const uint32_t normal = (a - 0x3c000000 + 0x7ffff + (a >> 20 & 1)) >> 20;
  const uint32_t subnormal = as_uint(add_rn(as_float(a), 16384.0f)) & 15;  // in steps of 2^-9
  const uint32_t finite = a >= 0x43e00000 ? 0x7e : a >= 0x3c800000 ? normal : subnormal;
  y.bits = a > 0x7f800000 ? 0x7f : uint8_t(s | finite);
#endif
}

// The value of x after storing it as T.
template <class T> KILN_FN float round_to(float x) {
  T y;
  from_float(x, y);
  return to_float(y);
}

// The larger of a and b, or NaN if either is NaN; fmaxf would drop the NaN.
KILN_FN float max_nan(float a, float b) { return a != a || a > b ? a : b; }
}  // namespace kiln
