// Programmatic dependent launch (PDL): a kernel may start before the kernel ahead of it in the
// stream has ended. Also constants for launch bounds.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// Additional registers that sm_120 needs for the same code.
#if __CUDA_ARCH__ >= 1200
constexpr int kExtraRegisters = 8;
#else
constexpr int kExtraRegisters = 0;
#endif
// Shared memory in bytes for the pipeline stages of a large block, and the number of such blocks
// that fit in an SM.
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
// Wait until the kernel ahead has ended and its writes are visible. Call it before the first read
// of what that kernel writes, and before the first write of what it reads.
KILN_FN void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Let the next kernel start; its pdl_wait still waits for the end of this one.
KILN_FN void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
#else  // ---- host ------------------------------------------------------------------------------
constexpr int kLargeBytes = 106 * 1024;  // like Hopper
constexpr int kLargeBlocks = 2;
KILN_FN void pdl_wait() { cuda_host::wait_for_launch_ahead(); }
KILN_FN void pdl_launch_dependents() { cuda_host::launch_dependents(); }
#endif

// A kernel's first statement says how it may be launched early. pdl_writes_plan: the kernel writes
// a plan, or other data that a later kernel reads before it waits. pdl_reads_plan: before pdl_wait
// the kernel reads the plan, and data that no kernel writes between the plan and it. It reads them
// through L2 (copy_async_16, load_relaxed), as L1 may hold an earlier step's plan. It is not
// launched early directly behind a plan: only a kernel in between, which waits for the plan and
// then lets the next one start, guarantees that the plan is complete.
KILN_FN void pdl_writes_plan() { pdl_wait(); }
KILN_FN void pdl_reads_plan() {}

// First statement of a kernel that prefetches before pdl_wait. The kernel ahead may still write
// that data: a prefetch is a hint and reads nothing.
KILN_FN void pdl_hints_first() {}

// Let the next kernel start once this kernel's last blocks run and all others have ended. A call in
// each of thousands of short blocks would slow them down.
KILN_FN void pdl_launch_dependents_last() {
  constexpr unsigned kLast = 2112;  // blocks that fit in a large GPU
  if (blockIdx.x + kLast >= gridDim.x) pdl_launch_dependents();
}
// First statement of any other kernel: it may be launched early, and accesses no memory before the
// kernel ahead has ended.
KILN_FN void pdl_wait_then_trigger() {
  pdl_wait();
  pdl_launch_dependents_last();
}
}  // namespace kiln
