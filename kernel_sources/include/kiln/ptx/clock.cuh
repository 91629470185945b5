// The clock for limits on waiting.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {
#ifdef KILN_ON_GPU  // ---- device ---------------------------------------------------------------
// Nanoseconds of a clock that all SMs share. It advances in steps of up to a millisecond.
KILN_FN uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
constexpr uint32_t kPollsPerClock = 256;  // a poll takes about as long as reading the clock
#else  // ---- host ------------------------------------------------------------------------------
// A virtual clock: it stands still while any thread makes progress, so a run can be repeated.
KILN_FN uint64_t nanoseconds() { return cuda_host::nanoseconds(); }
constexpr uint32_t kPollsPerClock = 4;
#endif
}  // namespace kiln
