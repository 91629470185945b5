// Thread block clusters (sm_90 and later): blocks that run together and can access each other's
// shared memory. A kernel declares KILN_CLUSTER(n, 1, 1) or (1, n, 1), and its grid is a multiple
// of that. On GPUs without clusters the macro is empty.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
#if __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#define KILN_CLUSTER(x, y, z) __cluster_dims__(x, y, z)
#else
constexpr bool kClusters = false;
#define KILN_CLUSTER(x, y, z)
#endif
KILN_FN uint32_t cluster_rank() {  // of this block in its cluster
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
KILN_FN uint32_t cluster_size() {  // in blocks
  uint32_t r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
// A cluster barrier in two halves, each called by whole warps. After the wait, all writes before
// any thread's arrival are visible. A block must not exit while a peer may still access its shared
// memory.
KILN_FN void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
KILN_FN void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
KILN_FN void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// Return the address of a shared variable in block `rank` of the cluster.
template <class T> KILN_FN T* map_shared(T* p, uint32_t rank) {
  uint64_t r;
  asm("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(r);
}
// Mailbox accesses to another block's shared memory, four words each. Each word arrives on its own:
// no order holds between words, and a word that has arrived tells nothing about other data.
KILN_FN void store_words_cluster(void* p, const uint32_t (&w)[4]) {
  asm volatile("st.relaxed.cluster.v4.u32 [%0], {%1, %2, %3, %4};"
               :: "l"(p), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
}
KILN_FN void load_words_cluster(uint32_t (&w)[4], const void* p) {
  asm volatile("ld.relaxed.cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3]) : "l"(p) : "memory");
}
#else  // ---- host ------------------------------------------------------------------------------
constexpr bool kClusters = true;
#define KILN_CLUSTER(x, y, z)  // the host toolchain parses it from the kernel's source
__forceinline__ uint32_t cluster_rank() { return cuda_host::cluster_rank(); }
__forceinline__ uint32_t cluster_size() { return cuda_host::cluster_size(); }
__forceinline__ void cluster_arrive(CUDA_HOST_SITE) { cuda_host::cluster_arrive(site); }
__forceinline__ void cluster_wait(CUDA_HOST_SITE) { cuda_host::cluster_wait(site); }
__forceinline__ void cluster_sync(CUDA_HOST_SITE) {
  cuda_host::cluster_arrive(site);
  cuda_host::cluster_wait(site);
}
template <class T> __forceinline__ T* map_shared(T* p, uint32_t rank, CUDA_HOST_SITE) {
  return static_cast<T*>(cuda_host::map_shared(p, rank, site));
}
__forceinline__ void store_words_cluster(void* p, const uint32_t (&w)[4], CUDA_HOST_SITE) {
  for (int i = 0; i < 4; ++i)
    cuda_host::atomic(cuda_host::store, static_cast<uint32_t*>(p) + i, 4, w[i], 0,
                      cuda_host::relaxed, cuda_host::gpu, site);
}
__forceinline__ void load_words_cluster(uint32_t (&w)[4], const void* p, CUDA_HOST_SITE) {
  for (int i = 0; i < 4; ++i)
    w[i] = uint32_t(cuda_host::atomic(cuda_host::load,
                                      const_cast<uint32_t*>(static_cast<const uint32_t*>(p)) + i, 4,
                                      0, 0, cuda_host::relaxed, cuda_host::gpu, site));
}
#endif
}  // namespace kiln
