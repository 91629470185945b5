// Tensor cores of sm_90a (wgmma): four warps add 64 x 16 times 16 x N to 64 x N asynchronously.
// Warp w holds rows 16 w .. 16 w + 15 of the result, and of A if it is in registers, in the
// fragments of mma.cuh. Operands in shared memory are panels: rows of 128 bytes that start at a
// multiple of 1024 bytes, swizzled so that eight rows fall in different banks.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

// Return the byte offset of a 16-byte chunk of a panel's row.
KILN_FN int swizzled(int row, int chunk) { return row * 128 + ((chunk ^ row) & 7) * 16; }
// Round p up to a multiple of 1024 bytes.
KILN_FN unsigned char* panel_begin(unsigned char* p) {
  return p + (1024 - (reinterpret_cast<uint64_t>(p) & 1023) & 1023);
}

#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
using Panel = uint64_t;  // matrix descriptor: 128-byte swizzle, 8 rows in 1024 bytes
KILN_FN Panel panel(const void* p, int next = 16) {
  const uint64_t address = uint32_t(__cvta_generic_to_shared(p)) >> 4 & 0x3fff;
  return address | uint64_t(next >> 4) << 16 | uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}
KILN_FN void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
KILN_FN void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int N> KILN_FN void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(N) : "memory");
}
KILN_FN void publish_to_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#define KILN_4(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define KILN_32(n) KILN_4(n), KILN_4(n + 1), KILN_4(n + 2), KILN_4(n + 3), KILN_4(n + 4), \
                   KILN_4(n + 5), KILN_4(n + 6), KILN_4(n + 7)
#define KILN_NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,"   \
                      "%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define KILN_NAMES_64 KILN_NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"  \
                      "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
template <class T, bool ADD> KILN_FN void wgmma(float (&d)[16][4], Panel a, Panel b);
template <class T>
KILN_FN void wgmma_transposed(float (&d)[16][4], const uint32_t (&a)[4], Panel b);
template <class T>
KILN_FN void wgmma_transposed(float (&d)[8][4], const uint32_t (&a)[4], Panel b);
#define KILN_WGMMA(T, kind, ADD)                                                                 \
  template <> KILN_FN void wgmma<T, ADD>(float (&d)[16][4], Panel a, Panel b) {                  \
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." kind "." kind                    \
                 " {" KILN_NAMES_64 "}, %64, %65, %66, 1, 1, 0, 0;"                              \
                 : KILN_32(0), KILN_32(8) : "l"(a), "l"(b), "n"(int(ADD)));                      \
  }
#define KILN_WGMMA_TRANSPOSED(T, kind, N, names, operands, a0, a1, a2, a3, b0, ...)              \
  template <>                                                                                    \
  KILN_FN void wgmma_transposed<T>(float (&d)[N / 8][4], const uint32_t (&a)[4], Panel b) {      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" operands "k16.f32." kind "." kind           \
                 " {" names "}, {" a0 "," a1 "," a2 "," a3 "}, " b0 ", 1, 1, 1, 1;"              \
                 : __VA_ARGS__ : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));            \
  }
#define KILN_WGMMAS(T, kind)                                                                     \
  KILN_WGMMA(T, kind, false)                                                                     \
  KILN_WGMMA(T, kind, true)                                                                      \
  KILN_WGMMA_TRANSPOSED(T, kind, 64, KILN_NAMES_32, "64", "%32", "%33", "%34", "%35", "%36",     \
                        KILN_32(0))                                                              \
  KILN_WGMMA_TRANSPOSED(T, kind, 128, KILN_NAMES_64, "128", "%64", "%65", "%66", "%67", "%68",   \
                        KILN_32(0), KILN_32(8))
KILN_WGMMAS(bf16, "bf16")
KILN_WGMMAS(fp16, "f16")
#undef KILN_4
#undef KILN_32
#undef KILN_NAMES_32
#undef KILN_NAMES_64
#undef KILN_WGMMA
#undef KILN_WGMMA_TRANSPOSED
#undef KILN_WGMMAS

#else  // ---- host ------------------------------------------------------------------------------
// An operand: where it starts in a panel and, if its rows are longer than 128 bytes, how many bytes
// further its next panel is.
using Panel = cuda_host::Panel;
KILN_FN Panel panel(const void* p, int next = 16) {
  return {static_cast<const unsigned char*>(p), next};
}
// Commit the operations since the last commit as one group.
__forceinline__ void wgmma_commit() { cuda_host::wgmma_commit(); }
// Call before the first wgmma, and after a thread writes registers that a wgmma reads.
__forceinline__ void wgmma_fence() { cuda_host::wgmma_fence(); }
// Wait until at most the newest N groups are in flight. Until then, no thread may access their
// registers.
template <int N> __forceinline__ void wgmma_wait(CUDA_HOST_SITE) { cuda_host::wgmma_wait(N, site); }
// Make this thread's writes to shared memory visible to wgmma; a barrier must follow.
__forceinline__ void publish_to_wgmma() { cuda_host::publish_to_wgmma(); }

template <class T> constexpr bool kIsBf16 = false;
template <> constexpr bool kIsBf16<bf16> = true;
// d = a b^T, or with ADD d += a b^T; a has 64 rows and b 128 rows, of 16 columns.
template <class T, bool ADD>
__forceinline__ void wgmma(float (&d)[16][4], Panel a, Panel b, CUDA_HOST_SITE) {
  cuda_host::wgmma({kIsBf16<T>, ADD, 16, d, nullptr, a, b}, site);
}
// d += a b; b has 16 rows of 64 or 128 columns.
template <class T, int N>
__forceinline__ void wgmma_transposed(float (&d)[N][4], const uint32_t (&a)[4], Panel b,
                                      CUDA_HOST_SITE) {
  cuda_host::wgmma({kIsBf16<T>, true, N, d, a, {}, b}, site);
}
#endif
}  // namespace kiln
