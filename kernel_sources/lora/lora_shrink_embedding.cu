// h[t, k] = A[token_ids[t], k] for each k below the rank of t's adapter: columns of A, as floats
// token_ids: [tokens]; h: [tokens, width] float32, width >= every rank; A: [vocab_size, rank]
//
// token_slots and the tables are those of lora_shrink; rows: [1], the row of the embedding in the
// tables. Compile-time parameters (jit_kernels/ops/lora/spec.py): SCALAR_T.
// Work split: one block per token. Blocks without an adapter exit at once.
// Memory: no thread reads what another writes.
// Callers: token ids are within the vocabulary. Columns of h without a rank keep their values, as
// do rows without an adapter.
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

extern "C" __global__ void __launch_bounds__(64)
lora_shrink_embedding(float* h, const int64_t* token_ids, const SCALAR_T* adapter_pool,
                      const int32_t* token_slots, const int32_t* rows, const int32_t* rank_table,
                      const int64_t* a_table, int64_t h_stride, int num_slots) {
  kiln::pdl_wait_then_trigger();
  const int64_t token = blockIdx.x;
  const int slot = token_slots[token];
  if (slot < 0) return;
  const int64_t at = int64_t(rows[0]) * num_slots + slot;
  const int rank = rank_table[at];
  if (rank == 0) return;
  const SCALAR_T* a = adapter_pool + a_table[at] + token_ids[token] * rank;
  for (int k = threadIdx.x; k < rank; k += blockDim.x)
    h[token * h_stride + k] = kiln::to_float(a[k]);
}
