// Dependent launches: a kernel that may start before the one ahead of it in the stream has ended.
// And what a launch bound has to allow for.
#pragma once
#include "kiln/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// What sm_120 takes more for the same code than the others.
#if __CUDA_ARCH__ >= 1200
constexpr int kExtraRegisters = 8;
#else
constexpr int kExtraRegisters = 0;
#endif
// Wait until the kernel ahead has ended and its writes are seen. Comes before the first read of
// what it wrote, and the first write of what it reads.
KILN_FN void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Let the next kernel start; what it waits for is still the end of this one.
KILN_FN void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#else  // ---- host ------------------------------------------------------------------------------
KILN_FN void pdl_wait() { cuda_host::wait_for_launch_ahead(); }
KILN_FN void pdl_launch_dependents() {}
#endif

// What a kernel begins with, so that it may be launched early: it touches nothing before the kernel
// ahead has ended, and lets the next one come and wait as soon as its last blocks are there and the
// others have ended. Were each of thousands of short blocks to let it in, those would take longer.
KILN_FN void take_turn() {
  constexpr unsigned kLast = 1024;
  pdl_wait();
  if (blockIdx.x + kLast >= gridDim.x) pdl_launch_dependents();
}
}  // namespace kiln
