// Asynchronous copies from global to shared memory (cp.async).
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
KILN_FN uint32_t shared_address(const void* p) { return uint32_t(__cvta_generic_to_shared(p)); }

#if __CUDA_ARCH__ >= 800
// Copy 16 bytes between 16-byte aligned addresses. If not valid, write zeros and read nothing.
KILN_FN void copy_async_16(void* to, const void* from, bool valid = true) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// Commit the copies since the last commit as one group.
KILN_FN void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most the newest N groups of this thread are in flight. Other threads may read the
// copied data only after a barrier.
template <int N> KILN_FN void copy_wait() {
  asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory");
}
#else  // sm_75 copies synchronously, through registers
KILN_FN void copy_async_16(void* to, const void* from, bool valid = true) {
  struct alignas(16) Bytes { uint32_t v[4]; } bytes{};
  if (valid) bytes = load_vector<Bytes>(from);
  store_vector(to, bytes);
}
KILN_FN void copy_commit() {}
template <int N> KILN_FN void copy_wait() {}
#endif

#else  // ---- host ------------------------------------------------------------------------------
__forceinline__ void copy_async_16(void* to, const void* from, bool valid = true, CUDA_HOST_SITE) {
  cuda_host::copy_async(to, from, 16, valid, site);
}
__forceinline__ void copy_commit() { cuda_host::copy_commit(); }
template <int N> __forceinline__ void copy_wait() { cuda_host::copy_wait(N); }
#endif
}  // namespace kiln
