// Memory accesses with an order and a scope, for data that blocks or GPUs share.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
enum class Scope { gpu, sys };  // shared by threads of one GPU, or of several

#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
#define KILN_LOAD(name, order)                                                                   \
  template <Scope S = Scope::gpu> KILN_FN uint32_t name(const uint32_t* p) {                     \
    uint32_t x;                                                                                  \
    if (S == Scope::sys)                                                                         \
      asm volatile("ld." order ".sys.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");       \
    else                                                                                         \
      asm volatile("ld." order ".gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");       \
    return x;                                                                                    \
  }
#define KILN_STORE(name, order)                                                                  \
  template <Scope S = Scope::gpu> KILN_FN void name(uint32_t* p, uint32_t x) {                   \
    if (S == Scope::sys)                                                                         \
      asm volatile("st." order ".sys.global.u32 [%0], %1;" :: "l"(p), "r"(x) : "memory");        \
    else                                                                                         \
      asm volatile("st." order ".gpu.global.u32 [%0], %1;" :: "l"(p), "r"(x) : "memory");        \
  }
#define KILN_COUNT(name, op)                                                                     \
  template <Scope S = Scope::gpu> KILN_FN uint32_t name(uint32_t* p, uint32_t x) {               \
    uint32_t old;                                                                                \
    if (S == Scope::sys)                                                                         \
      asm volatile("atom.acq_rel.sys.global." op ".u32 %0, [%1], %2;"                            \
                   : "=r"(old) : "l"(p), "r"(x) : "memory");                                     \
    else                                                                                         \
      asm volatile("atom.acq_rel.gpu.global." op ".u32 %0, [%1], %2;"                            \
                   : "=r"(old) : "l"(p), "r"(x) : "memory");                                     \
    return old;                                                                                  \
  }
KILN_LOAD(load_acquire, "acquire")
KILN_LOAD(load_relaxed, "relaxed")
KILN_STORE(store_release, "release")
KILN_STORE(store_relaxed, "relaxed")
KILN_COUNT(arrive, "inc")
KILN_COUNT(add_acq_rel, "add")
// Vector forms: each word is accessed atomically, and no order holds between words.
template <Scope S = Scope::gpu> KILN_FN void load_words_relaxed(uint32_t (&w)[4], const void* p) {
  if (S == Scope::sys)
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
  else
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
KILN_FN void load_words_relaxed(uint32_t (&w)[2], const void* p) {
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];"
               : "=r"(w[0]), "=r"(w[1]) : "l"(p) : "memory");
}
template <Scope S = Scope::gpu> KILN_FN void store_words_relaxed(void* p, const uint32_t (&w)[4]) {
  if (S == Scope::sys)
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
  else
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
// Prefetch the 128-byte line of p into L2. A hint: nothing is read.
KILN_FN void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
#undef KILN_LOAD
#undef KILN_STORE
#undef KILN_COUNT

#else  // ---- host ------------------------------------------------------------------------------
template <Scope S>
__forceinline__ uint32_t host_atomic(cuda_host::Op op, const uint32_t* p, uint32_t x,
                                     cuda_host::Order order, cuda_host::Site site) {
  const cuda_host::Scope scope = S == Scope::sys ? cuda_host::sys : cuda_host::gpu;
  return uint32_t(cuda_host::atomic(op, const_cast<uint32_t*>(p), 4, x, 0, order, scope, site));
}

// What a thread writes before its store_release is visible after a load_acquire that reads the
// stored value. Poll only with these: a loop on a plain load never ends.
template <Scope S = Scope::gpu>
__forceinline__ uint32_t load_acquire(const uint32_t* p, CUDA_HOST_SITE) {
  return host_atomic<S>(cuda_host::load, p, 0, cuda_host::acquire, site);
}
template <Scope S = Scope::gpu>
__forceinline__ void store_release(uint32_t* p, uint32_t x, CUDA_HOST_SITE) {
  host_atomic<S>(cuda_host::store, p, x, cuda_host::release, site);
}
template <Scope S = Scope::gpu>
__forceinline__ uint32_t load_relaxed(const uint32_t* p, CUDA_HOST_SITE) {
  return host_atomic<S>(cuda_host::load, p, 0, cuda_host::relaxed, site);
}
template <Scope S = Scope::gpu>
__forceinline__ void store_relaxed(uint32_t* p, uint32_t x, CUDA_HOST_SITE) {
  host_atomic<S>(cuda_host::store, p, x, cuda_host::relaxed, site);
}

template <Scope S = Scope::gpu, int N>
__forceinline__ void load_words_relaxed(uint32_t (&w)[N], const void* p, CUDA_HOST_SITE) {
  for (int i = 0; i < N; ++i) w[i] = load_relaxed<S>(static_cast<const uint32_t*>(p) + i, site);
}
template <Scope S = Scope::gpu>
__forceinline__ void store_words_relaxed(void* p, const uint32_t (&w)[4], CUDA_HOST_SITE) {
  for (int i = 0; i < 4; ++i) store_relaxed<S>(static_cast<uint32_t*>(p) + i, w[i], site);
}

// Count 0, 1, .., last, 0, 1, ..; return the old value. Releases this thread's writes, and after a
// barrier its block's; acquires the writes that earlier arrivals released.
template <Scope S = Scope::gpu>
__forceinline__ uint32_t arrive(uint32_t* counter, uint32_t last, CUDA_HOST_SITE) {
  return host_atomic<S>(cuda_host::inc, counter, last, cuda_host::acq_rel, site);
}
KILN_FN void prefetch(const void*) {}
// Add and return the old value; ordered like arrive.
template <Scope S = Scope::gpu>
__forceinline__ uint32_t add_acq_rel(uint32_t* p, uint32_t x, CUDA_HOST_SITE) {
  return host_atomic<S>(cuda_host::add, p, x, cuda_host::acq_rel, site);
}
#endif
}  // namespace kiln
