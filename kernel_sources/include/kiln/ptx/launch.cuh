// Dependent launches: a kernel that may start before the one ahead of it in the stream has ended.
// And what a launch bound has to allow for.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// What sm_120 takes more for the same code than the others.
#if __CUDA_ARCH__ >= 1200
constexpr int kExtraRegisters = 8;
#else
constexpr int kExtraRegisters = 0;
#endif
// How much shared memory a large block may have for what it fetches, and how many such blocks a
// multiprocessor has room for.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kLargeBytes = 106 * 1024;
#else
constexpr int kLargeBytes = 70 * 1024;
#endif
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kLargeBlocks = 1;
#else
constexpr int kLargeBlocks = 2;
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
constexpr int kLargeBytes = 106 * 1024;  // as Hopper
KILN_FN void pdl_wait() { cuda_host::wait_for_launch_ahead(); }
KILN_FN void pdl_launch_dependents() { cuda_host::launch_dependents(); }
#endif

// What a plan begins with, or whatever else writes what was there before a step; and what a kernel
// begins with that reads such things before it waits: the plan, and what nobody writes between the
// plan and it; by way of the L2 cache (copy_async_16, load_relaxed), as the L1 may hold the plan of a
// step before. All else that it does comes after pdl_wait. Right behind one that writes a plan it is
// not launched early: only a kernel between the two that has waited for the plan, and lets the next
// one in after that, tells that it is there.
KILN_FN void pdl_writes_plan() { pdl_wait(); }
KILN_FN void pdl_reads_plan() {}

// What a kernel begins with that asks for what it will read before it waits, by hints: a write of
// the kernel ahead does not come too late for them.
KILN_FN void pdl_hints_first() {}

// Let the next kernel come and wait as soon as this one's last blocks are there and the others have
// ended. Were each of thousands of short blocks to let it in, those would take longer.
KILN_FN void pdl_launch_dependents_last() {
  constexpr unsigned kLast = 2112;  // that a large GPU has room for
  if (blockIdx.x + kLast >= gridDim.x) pdl_launch_dependents();
}
// What a kernel begins with, so that it may be launched early: it touches nothing before the kernel
// ahead has ended.
KILN_FN void take_turn() {
  pdl_wait();
  pdl_launch_dependents_last();
}
}  // namespace kiln
