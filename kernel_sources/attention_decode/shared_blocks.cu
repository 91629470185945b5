// shared[r] = number of first KV blocks that requests r - 1 and r have in common; shared[0] = 0
// shared, seq_lens: [num_requests]; block_table: [num_requests, ..]. No compile-time parameters.
//
// Work split: a warp compares two rows of the table, kAtOnce ids of each at a time, and stops at
// the first difference.
//
// Memory: reads ids of whole and partly filled blocks only, each row twice; no shared memory.
//
// The caller launches this kernel once a step, before attention_plan.
#include "kiln/attention/split.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/warp.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kLoads = 4, kAtOnce = kLoads * 32;  // ids

KILN_FN int num_blocks(int seq_len) { return (seq_len + kiln::kKVBlock - 1) / kiln::kKVBlock; }

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
shared_blocks(int* shared, const int* block_table, const int* seq_lens, int64_t table_row,
              int num_requests) {
  kiln::pdl_wait_then_trigger();
  const int request = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (request >= num_requests) return;
  int equal = 0;
  if (request > 0) {
    const int* own = block_table + request * table_row;
    const int* other = own - table_row;
    const int most = min(num_blocks(seq_lens[request - 1]), num_blocks(seq_lens[request]));
    unsigned differs = 0;
#pragma unroll 1
    for (int from = 0; from < most && !differs; from += kAtOnce) {
      bool same[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int i = from + k * 32 + lane;
        same[k] = i < most && own[i] == other[i];
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        if (differs) continue;
        differs = __ballot_sync(0xffffffffu, !same[k]);
        equal += differs ? __ffs(int(differs)) - 1 : 32;
      }
    }
  }
  if (lane == 0) shared[request] = equal;
}
