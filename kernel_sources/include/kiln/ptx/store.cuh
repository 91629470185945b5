// Stores of 4, 8 or 16 bytes to global memory in one instruction. A struct assignment means the
// same, but NVRTC splits it into words where it cannot prove the alignment.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
KILN_FN void store_words(void* p, const uint32_t (&w)[4]) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
KILN_FN void store_words(void* p, const uint32_t (&w)[2]) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" :: "l"(p), "r"(w[0]), "r"(w[1]) : "memory");
}
KILN_FN void store_words(void* p, const uint32_t (&w)[1]) {
  asm volatile("st.global.u32 [%0], %1;" :: "l"(p), "r"(w[0]) : "memory");
}
template <class V> KILN_FN void store_global(void* p, const V& v) {
  store_words(p, reinterpret_cast<const uint32_t (&)[sizeof(V) / 4]>(v));
}
#else  // ---- host ------------------------------------------------------------------------------
template <int N> KILN_FN void store_words(void* p, const uint32_t (&w)[N]) {
  struct Words { uint32_t w[N]; };
  cuda_host::store_vector(p, cuda_host::copy_bits<Words>(w));
}
template <class V> KILN_FN void store_global(void* p, const V& v) { store_vector(p, v); }
#endif
}  // namespace kiln
