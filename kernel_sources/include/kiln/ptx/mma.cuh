// Tensor cores (mma, sm_80 and later): a warp adds 16 x 16 times 16 x 8 to 16 x 8.
// With g = lane / 4 and t = lane % 4, a lane holds pairs of neighbours:
//   a[0] A[g][2t..], a[1] A[g + 8][2t..], a[2] A[g][2t + 8..], a[3] A[g + 8][2t + 8..]
//   b0   B[2t..][g], b1   B[2t + 8..][g]
//   d[0], d[1] D[g][2t..], d[2], d[3] D[g + 8][2t..]
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
template <class T> KILN_FN uint32_t pack(float lo, float hi) {  // for sm_75
  T a, b;
  from_float(lo, a);
  from_float(hi, b);
  return uint32_t(b.bits) << 16 | a.bits;
}
#if __CUDA_ARCH__ >= 800
template <> KILN_FN uint32_t pack<bf16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
template <> KILN_FN uint32_t pack<fp16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
#endif

#define KILN_LDMATRIX(name, kind)                                                                \
  KILN_FN void name(uint32_t (&r)[4], const void* row) {                                         \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" kind ".shared.b16 {%0,%1,%2,%3}, [%4];"         \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])                                \
                 : "r"(uint32_t(__cvta_generic_to_shared(row))) : "memory");                     \
  }
KILN_LDMATRIX(ldmatrix_x4, "")
KILN_LDMATRIX(ldmatrix_x4_trans, ".trans")
#undef KILN_LDMATRIX

KILN_FN uint32_t transpose_8x8(uint32_t x) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
  return r;
}

template <class T>
KILN_FN void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
#define KILN_MMA(T, kind)                                                                        \
  template <>                                                                                    \
  KILN_FN void mma_m16n8k16<T>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,               \
                               uint32_t b1) {                                                    \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." kind "." kind ".f32 "                           \
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                  \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                         \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                         \
  }
KILN_MMA(bf16, "bf16")
KILN_MMA(fp16, "f16")
#undef KILN_MMA

#else  // ---- host ------------------------------------------------------------------------------
// Round two floats to T and pack them as mma takes them; lo in the lower half.
template <class T> __forceinline__ uint32_t pack(float lo, float hi) {
  T a, b;
  from_float(lo, a);
  from_float(hi, b);
  return uint32_t(b.bits) << 16 | a.bits;
}

// Load four 8 x 8 tiles of 16-bit elements. Lane i gives the address of row i % 8 of tile i / 8 in
// shared memory, 16-byte aligned. r[j] becomes the pair [lane / 4][2 * (lane % 4)..] of tile j;
// transposed, elements [2 * (lane % 4)][lane / 4] and [2 * (lane % 4) + 1][lane / 4].
__forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row, CUDA_HOST_SITE) {
  cuda_host::load_matrix(cuda_host::warp_ldmatrix, r, row, site);
}
__forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, CUDA_HOST_SITE) {
  cuda_host::load_matrix(cuda_host::warp_ldmatrix_trans, r, row, site);
}

// Transpose an 8 x 8 tile of 16-bit elements. Each lane gives the pair [lane / 4][2 * (lane % 4)..]
// of the tile, and gets that of the transposed tile.
__forceinline__ uint32_t transpose_8x8(uint32_t x, CUDA_HOST_SITE) {
  const int lane = int(threadIdx.x % 32), from = lane % 4 * 8 + lane / 8, shift = lane / 4 % 2 * 16;
  const uint32_t first = __shfl_sync(0xffffffffu, x, from, 32, site) >> shift;
  const uint32_t second = __shfl_sync(0xffffffffu, x, from + 4, 32, site) >> shift;
  return (first & 0xffff) | second << 16;
}

// d += a * b; products are exact, sums in float32.
template <class T>
__forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                  CUDA_HOST_SITE);
template <>
__forceinline__ void mma_m16n8k16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, cuda_host::Site site) {
  cuda_host::mma(cuda_host::warp_mma_bf16, d, a, b0, b1, site);
}
template <>
__forceinline__ void mma_m16n8k16<fp16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                        uint32_t b1, cuda_host::Site site) {
  cuda_host::mma(cuda_host::warp_mma_fp16, d, a, b0, b1, site);
}
#endif
}  // namespace kiln
