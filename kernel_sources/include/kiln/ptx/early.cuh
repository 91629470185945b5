// Loads before pdl_wait, of what no kernel between the plan and this one writes (pdl_reads_plan in
// launch.cuh). They go through L2: L1 may hold what an earlier step had at the same address.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// How L2 treats a line: keep it longer than others.
KILN_FN uint64_t stays_in_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
#define KILN_LOAD_EARLY(T, type, in)                                                             \
  KILN_FN T load_early(const T* p) {                                                             \
    T x;                                                                                         \
    asm volatile("ld.global.cg.L2::cache_hint." type " %0, [%1], %2;"                            \
                 : in(x) : "l"(p), "l"(stays_in_l2()));                                          \
    return x;                                                                                    \
  }
KILN_LOAD_EARLY(int32_t, "b32", "=r")
KILN_LOAD_EARLY(int64_t, "b64", "=l")
KILN_LOAD_EARLY(float, "f32", "=f")
#undef KILN_LOAD_EARLY
KILN_FN void load_early_words(uint32_t (&w)[4], const void* p) {
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p));
}
KILN_FN void load_early_words(uint32_t (&w)[2], const void* p) {
  asm volatile("ld.global.cg.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
}
// The same only if `wanted`, without a branch: else `w` stays as it is.
KILN_FN void load_early_if(bool wanted, uint32_t (&w)[4], const void* p) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %5, 0;"
               " @q ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4]; }"
               : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]) : "l"(p), "r"(uint32_t(wanted)));
}
KILN_FN void load_early_if(bool wanted, uint32_t (&w)[2], const void* p) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %3, 0; @q ld.global.cg.v2.b32 {%0, %1}, [%2]; }"
               : "+r"(w[0]), "+r"(w[1]) : "l"(p), "r"(uint32_t(wanted)));
}
KILN_FN void load_early_if(bool wanted, uint32_t (&w)[1], const void* p) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %2, 0; @q ld.global.cg.b32 %0, [%1]; }"
               : "+r"(w[0]) : "l"(p), "r"(uint32_t(wanted)));
}
KILN_FN void load_early_if(bool wanted, short& x, const short* p) {
  asm volatile("{ .reg .pred q; setp.ne.u32 q, %2, 0; @q ld.global.cg.b16 %0, [%1]; }"
               : "+h"(x) : "l"(p), "r"(uint32_t(wanted)));
}
template <class V> KILN_FN V load_early_vector(const void* p) {  // of 8 or 16 bytes
  V v;
  load_early_words(reinterpret_cast<uint32_t (&)[sizeof(V) / 4]>(v), p);
  return v;
}
#else  // ---- host ------------------------------------------------------------------------------
template <class T> KILN_FN T load_early(const T* p) { return *p; }
template <int N> KILN_FN void load_early_if(bool wanted, uint32_t (&w)[N], const void* p) {
  struct alignas(4 * N) Vector { uint32_t w[N]; };
  if (!wanted) return;
  const auto loaded = load_vector<Vector>(p);
  for (int i = 0; i < N; ++i) w[i] = loaded.w[i];
}
KILN_FN void load_early_if(bool wanted, short& x, const short* p) {
  if (wanted) x = *p;
}
template <class V> KILN_FN V load_early_vector(const void* p) { return load_vector<V>(p); }
#endif
}  // namespace kiln
