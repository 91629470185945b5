// Everything that differs between the GPU and the CPU, device body and host body side by side.
// The only header with asm or a compiler switch: NVRTC reads the first half, g++ and clang the second.
#pragma once

#ifdef __CUDACC_RTC__  // ---- device ------------------------------------------------------------
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int32_t = int;
using int64_t = long long;
#define KILN_FN __device__ __forceinline__

namespace kiln {
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

KILN_FN uint32_t as_uint(float x) { return __float_as_uint(x); }
KILN_FN float as_float(uint32_t x) { return __uint_as_float(x); }

KILN_FN float to_float(fp16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
KILN_FN void from_float(float x, fp16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }

// sm_75 has no bf16 conversion: round to nearest even by hand, as the host body does.
KILN_FN void from_float(float x, bf16& y) {
#if __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const uint32_t u = as_uint(x);
  y.bits = x != x ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
#endif
}

// One memory access of sizeof(V) bytes.
template <class V> KILN_FN V load_vector(const void* p) { return *static_cast<const V*>(p); }
template <class V> KILN_FN void store_vector(void* p, const V& v) { *static_cast<V*>(p) = v; }
}  // namespace kiln

#else  // ---- host ------------------------------------------------------------------------------
#include "cuda_host.h"
#define KILN_FN inline

namespace kiln {
struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

KILN_FN uint32_t as_uint(float x) { return uint32_t(cuda_host::bits(x)); }
KILN_FN float as_float(uint32_t x) { return cuda_host::unbits<float>(x); }

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

template <class V> KILN_FN V load_vector(const void* p) { return cuda_host::load_vector<V>(p); }
template <class V> KILN_FN void store_vector(void* p, const V& v) { cuda_host::store_vector(p, v); }
}  // namespace kiln
#endif

namespace kiln {
KILN_FN float to_float(float x) { return x; }
KILN_FN float to_float(bf16 x) { return as_float(uint32_t(x.bits) << 16); }
KILN_FN void from_float(float x, float& y) { y = x; }

// The value that x has once it is stored as T.
template <class T> KILN_FN float round_to(float x) {
  T y;
  from_float(x, y);
  return to_float(y);
}
}  // namespace kiln
