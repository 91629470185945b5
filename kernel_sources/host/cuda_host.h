// CUDA C++ on a CPU: the language surface. A template that includes this header through
// kiln/ptx/ptx.cuh compiles with g++ or clang++ and runs on this folder's fibers. It includes no
// header of the toolkit or of the C++ library, because every kernel would compile that too.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // only C's math.h; libstdc++'s <cmath> costs 0.1 s
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stdint.h>

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace cuda_host {
struct Site { const char* file; int line; };  // where a kernel made a call, for reports
enum Scope : int { cta, gpu, sys };
enum Order : int { relaxed, acquire, release, acq_rel };
enum Op : int { load, store, add, sub, exch, cas, max_, min_, and_, or_, xor_, inc, add_float };
enum WarpOp : int {
  warp_sync, warp_shuffle, warp_ballot, warp_ldmatrix, warp_ldmatrix_trans, warp_mma_bf16,
  warp_mma_fp16, warp_wgmma, warp_wgmma_wait
};

#define CUDA_HOST_API __attribute__((visibility("default")))
#define CUDA_HOST_CONST __attribute__((visibility("default"), const))  // a constant within a thread
CUDA_HOST_CONST uint3 thread_idx();
CUDA_HOST_CONST uint3 block_idx();
CUDA_HOST_CONST dim3 block_dim();
CUDA_HOST_CONST dim3 grid_dim();
CUDA_HOST_CONST int lane();
CUDA_HOST_CONST void* dynamic_shared();           // 16-byte aligned
CUDA_HOST_API int barrier(bool vote, Site site);  // returns the sum of votes in the block
// Synchronise the lanes of `mask`. `value`: a shuffle's source lane, or a ballot's predicate. A
// shuffle replaces the `bytes` at `data` by the source lane's. A ballot returns the votes. A matrix
// operation reads its operands at `data` and stores its result there.
CUDA_HOST_API unsigned warp(WarpOp op, unsigned mask, int value, void* data, int bytes, Site site);
CUDA_HOST_API uint64_t atomic(Op op, void* p, int bytes, uint64_t value, uint64_t compare,
                              Order order, Scope scope, Site site);
CUDA_HOST_API void fence(Scope scope);
// A clock that advances by a second whenever all threads wait, and stands still otherwise. It is
// the real time where threads wait for other processes.
CUDA_HOST_API uint64_t nanoseconds();
// cp.async: the seed decides whether the bytes arrive when a wait covers their group, or earlier.
// Until that wait they are poison, or count as uninitialised.
CUDA_HOST_API void copy_async(void* to, const void* from, int bytes, bool valid, Site site);
CUDA_HOST_API void copy_commit();
CUDA_HOST_API void copy_wait(int pending);  // for all but the newest `pending` groups
// wgmma: a warp's 16 rows of a result with 8 * eights columns. The seed decides whether it is added
// when a wait covers its group, or earlier. Until that wait d is poison, and d and a may not be
// used.
struct Panel { const unsigned char* begin; int next; };
struct WgmmaOperands {  // operands of one lane; a: null if A is in shared memory (`in`)
  bool bf16, adds;
  int eights;
  float (*d)[4];
  const uint32_t* a;
  Panel in, b;
};
CUDA_HOST_API void wgmma(const WgmmaOperands& of, Site site);
CUDA_HOST_API void wgmma_fence();  // afterwards, registers that wgmma uses may not be written
CUDA_HOST_API void wgmma_commit();
CUDA_HOST_API void wgmma_wait(int pending, Site site);  // for all but the newest `pending` groups
CUDA_HOST_API void publish_to_wgmma();
CUDA_HOST_API void wait_for_launch_ahead();
CUDA_HOST_API void launch_dependents();
CUDA_HOST_CONST unsigned cluster_rank();
CUDA_HOST_CONST unsigned cluster_size();
CUDA_HOST_API void cluster_arrive(Site site);
CUDA_HOST_API void cluster_wait(Site site);
CUDA_HOST_API void* map_shared(const void* p, unsigned rank, Site site);

template <class To, class From> inline To copy_bits(const From& from) {
  To to{};
  __builtin_memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  return to;
}
template <class T> inline uint64_t bits(T v) { return copy_bits<uint64_t>(v); }
template <class T> inline T unbits(uint64_t b) { return copy_bits<T>(b); }
template <class T> inline T shuffle(unsigned mask, T v, int source, Site site) {
  static_assert(sizeof(T) <= 16, "a shuffle moves at most 16 bytes");
  warp(warp_shuffle, mask, source, &v, sizeof v, site);
  return v;
}

struct MmaOperands { float d[4]; uint32_t a[4], b[2]; };  // of one lane
__attribute__((always_inline)) inline void mma(WarpOp op, float (&d)[4], const uint32_t (&a)[4],
                                               uint32_t b0, uint32_t b1, Site site) {
  MmaOperands io = {{d[0], d[1], d[2], d[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
  warp(op, ~0u, 0, &io, sizeof io, site);
  for (int i = 0; i < 4; i++) d[i] = io.d[i];
}
__attribute__((always_inline)) inline void load_matrix(WarpOp op, uint32_t (&r)[4],
                                                       const void* row, Site site) {
  uint64_t io[2] = {uint64_t(row), 0};  // in: the address; out: the elements
  warp(op, ~0u, 0, io, sizeof io, site);
  for (int i = 0; i < 4; i++) r[i] = uint32_t(io[i / 2] >> i % 2 * 32);
}

// One access of sizeof(V) bytes, as on the GPU. A compiler would split a plain struct copy into
// small accesses, which would hide a misaligned vector and report races of the wrong size.
template <int N> struct Raw { typedef char type __attribute__((vector_size(N), may_alias)); };
template <class V> inline V load_vector(const void* p) {
  const typename Raw<sizeof(V)>::type raw = *static_cast<const typename Raw<sizeof(V)>::type*>(p);
  return copy_bits<V>(raw);
}
template <class V> inline void store_vector(void* p, const V& v) {
  *static_cast<typename Raw<sizeof(V)>::type*>(p) = copy_bits<typename Raw<sizeof(V)>::type>(v);
}

// Entry<&kernel>::call unpacks parameters passed as to cuLaunchKernel: pointers to values.
template <int...> struct Indices {};
template <auto Kernel> struct Entry;
template <class... A, void (*Kernel)(A...)> struct Entry<Kernel> {
  template <int... I> __attribute__((no_sanitize("thread")))
  static void go(void** p, Indices<I...>) { Kernel(*static_cast<A*>(p[I])...); }
  template <int... I> static void call(void** p, Indices<I...> indices = {}) {
    if constexpr (sizeof...(I) == sizeof...(A)) go(p, indices);
    else call(p, Indices<I..., int(sizeof...(I))>{});
  }
};
}  // namespace cuda_host

#ifndef CUDA_HOST_RUNTIME  // the runtime itself uses no CUDA names
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __maxnreg__(n)
#define __forceinline__ inline __attribute__((always_inline))
// A module's __shared__ variables are in its thread-local segment, which the runtime saves and
// restores when it switches blocks. Section attributes would not work inside templates.
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (cuda_host::thread_idx())
#define blockIdx (cuda_host::block_idx())
#define blockDim (cuda_host::block_dim())
#define gridDim (cuda_host::grid_dim())
#define warpSize 32
#define CUDA_HOST_SITE cuda_host::Site site = {__builtin_FILE(), __builtin_LINE()}

#define CUDA_HOST_VECTORS(T, name)                           \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };         \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; };   \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
CUDA_HOST_VECTORS(int, int)
CUDA_HOST_VECTORS(unsigned, uint)
CUDA_HOST_VECTORS(float, float)

inline void __syncthreads(CUDA_HOST_SITE) { cuda_host::barrier(false, site); }
inline int __syncthreads_count(int p, CUDA_HOST_SITE) { return cuda_host::barrier(p, site); }
inline int __syncthreads_or(int p, CUDA_HOST_SITE) { return cuda_host::barrier(p, site) != 0; }
inline int __syncthreads_and(int p, CUDA_HOST_SITE) { return cuda_host::barrier(!p, site) == 0; }
inline void __syncwarp(unsigned mask = ~0u, CUDA_HOST_SITE) {
  cuda_host::warp(cuda_host::warp_sync, mask, 0, nullptr, 0, site);
}
inline unsigned __ballot_sync(unsigned mask, int p, CUDA_HOST_SITE) {
  return cuda_host::warp(cuda_host::warp_ballot, mask, p != 0, nullptr, 0, site);
}
inline int __any_sync(unsigned m, int p, CUDA_HOST_SITE) { return __ballot_sync(m, p, site) != 0; }
inline int __all_sync(unsigned m, int p, CUDA_HOST_SITE) { return __ballot_sync(m, !p, site) == 0; }
template <class T> inline T __shfl_sync(unsigned m, T v, int source, int w = 32, CUDA_HOST_SITE) {
  return cuda_host::shuffle(m, v, (cuda_host::lane() & -w) | (source & (w - 1)), site);
}
template <class T> inline T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, CUDA_HOST_SITE) {
  const int lane = cuda_host::lane(), source = lane ^ x;
  return cuda_host::shuffle(m, v, source >= (lane & -w) + w ? lane : source, site);
}
template <class T> inline T __shfl_down_sync(unsigned m, T v, int d, int w = 32, CUDA_HOST_SITE) {
  const int lane = cuda_host::lane(), source = lane + d;
  return cuda_host::shuffle(m, v, source >= (lane & -w) + w ? lane : source, site);
}
template <class T> inline T __shfl_up_sync(unsigned m, T v, int d, int w = 32, CUDA_HOST_SITE) {
  const int lane = cuda_host::lane(), source = lane - d;
  return cuda_host::shuffle(m, v, source < (lane & -w) ? lane : source, site);
}

// CUDA's own atomics are relaxed. For min and max, `compare` tells whether T is signed.
#define CUDA_HOST_ATOMIC(name, op, scope_)                                                        \
  template <class T> inline T name(T* p, T v, CUDA_HOST_SITE) {                                   \
    using namespace cuda_host;                                                                    \
    return unbits<T>(atomic(op, p, sizeof(T), bits(v), T(-1) < T(0), relaxed, scope_, site));     \
  }
#define CUDA_HOST_ATOMICS(_, scope)                                                               \
  CUDA_HOST_ATOMIC(atomicAdd##_, T(0.5f) != T(0) ? add_float : add, scope)                        \
  CUDA_HOST_ATOMIC(atomicSub##_, sub, scope) CUDA_HOST_ATOMIC(atomicExch##_, exch, scope)         \
  CUDA_HOST_ATOMIC(atomicMax##_, max_, scope) CUDA_HOST_ATOMIC(atomicMin##_, min_, scope)         \
  CUDA_HOST_ATOMIC(atomicAnd##_, and_, scope) CUDA_HOST_ATOMIC(atomicXor##_, xor_, scope)         \
  CUDA_HOST_ATOMIC(atomicOr##_, or_, scope)                                                       \
  template <class T> inline T atomicCAS##_(T* p, T compare, T v, CUDA_HOST_SITE) {                \
    using namespace cuda_host;                                                                    \
    return unbits<T>(atomic(cas, p, sizeof(T), bits(v), bits(compare), relaxed, scope, site));    \
  }
CUDA_HOST_ATOMICS(, gpu)
CUDA_HOST_ATOMICS(_block, cta)
CUDA_HOST_ATOMICS(_system, sys)
inline void __threadfence_block() { cuda_host::fence(cuda_host::cta); }
inline void __threadfence() { cuda_host::fence(cuda_host::gpu); }
inline void __threadfence_system() { cuda_host::fence(cuda_host::sys); }

#define __expf(x) expf(x)  // macros, because glibc declares functions with these names
#define __logf(x) logf(x)
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <class T> inline T __ldg(const T* p) { return *p; }
inline unsigned __float_as_uint(float x) { return unsigned(cuda_host::bits(x)); }
inline float __uint_as_float(unsigned x) { return cuda_host::unbits<float>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
#endif
