// h[t, k] = A[token_ids[t], k] for each k below the rank of t's adapter: columns of A, as floats
// token_ids: [tokens]; h: [tokens, width] float32, width >= every rank; A: [vocab_size, rank]
//
// The tiles and tables are those of lora_shrink, with one part. Compile-time parameters
// (jit_kernels/ops/lora/spec.py): SCALAR_T.
// Work split: one warp per token of a tile. Blocks without a token exit at once.
// Memory: no thread reads what another thread writes.
// Callers: token ids are within the vocabulary. Columns of h without a rank keep their values, as
// do rows without an adapter.
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

extern "C" __global__ void __launch_bounds__(1024)
lora_shrink_embedding(float* h, const int64_t* token_ids, const SCALAR_T* adapter_pool,
                      const int32_t* tile_slots, const int32_t* tile_tokens,
                      const int32_t* rank_table, const int64_t* a_table, int64_t h_stride) {
  kiln::pdl_wait_then_trigger();
  const int slot = tile_slots[blockIdx.x], warps = blockDim.x / 32;
  if (slot < 0) return;
  const int token = tile_tokens[int64_t(blockIdx.x) * warps + threadIdx.x / 32];
  if (token < 0) return;
  const int rank = rank_table[slot];
  const SCALAR_T* a = adapter_pool + a_table[slot] + token_ids[token] * rank;
  for (int k = threadIdx.x % 32; k < rank; k += 32) h[token * h_stride + k] = kiln::to_float(a[k]);
}
