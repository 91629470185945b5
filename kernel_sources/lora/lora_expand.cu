// out[t, start_p + o] += scale_p * sum_k h[t, first_p + k] * B_p[k, o] for each part p of a site
// out: [tokens, outputs], in place, any row stride; h: [tokens, width] float32, from lora_shrink
//
// start_p, the first output of part p, is where the part before it ends: 0, end0 or end1.
// first_p is the sum of the ranks of the parts before p. The tiles and tables are those of
// lora_shrink; scale_table has the scales, b_table the offsets of B [rank, outputs of p]. Each sum
// is rounded once, when it is added. Compile-time parameters (jit_kernels/ops/lora/spec.py):
// SCALAR_T.
// Work split: a warp adds to 64 columns of one part for a tile of tokens. Blocks without a token,
// and those behind the last part, exit at once. A sum adds the ranks in their order.
// Tensor cores take rows in vectors, and ranks that are multiples of 4. FMA takes all others, and
// its sums differ in the last bit. So a row's bits depend on its adapter and on the strides of out
// and h, and not on the other rows.
// Callers: a row of out has one token.
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

#include "lora/expand_fma.cuh"
#include "lora/expand_mma.cuh"
#include "lora/parts.cuh"

extern "C" __global__ void __launch_bounds__(128, 4)
lora_expand(SCALAR_T* out, const float* h, const SCALAR_T* adapter_pool, const int32_t* tile_slots,
            const int32_t* tile_tokens, const int32_t* rank_table, const float* scale_table,
            const int64_t* b_table, int64_t out_stride, int64_t h_stride, int end0, int end1,
            int outputs, int num_parts, int num_slots, int tile) {
  kiln::pdl_reads_plan();
  const int slot = kiln::load_early(tile_slots + blockIdx.y);
  const int width = int(blockDim.x) / 32 * kiln::kWarpColumns;
  const int starts[kiln::kMostParts + 1] = {0, end0, end1, outputs};
  int block = blockIdx.x, part = -1, start = 0, size = 0;
#pragma unroll
  for (int p = 0; p < kiln::kMostParts; ++p) {
    if (p >= num_parts || part >= 0) continue;
    const int of_part = starts[p + 1] - starts[p], blocks = (of_part + width - 1) / width;
    if (block < blocks) part = p, start = starts[p], size = of_part;
    else block -= blocks;
  }
  if (slot < 0 || part < 0) return kiln::pdl_wait();
  const int at = part * num_slots + slot;
  int column = 0;
#pragma unroll
  for (int p = 0; p + 1 < kiln::kMostParts; ++p)
    if (p < part) column += kiln::load_early(rank_table + p * num_slots + slot);
  const kiln::Tile<SCALAR_T> own{out + start,
                                 h + column,
                                 adapter_pool + kiln::load_early(b_table + at),
                                 tile_tokens + int64_t(blockIdx.y) * tile,
                                 out_stride,
                                 h_stride,
                                 kiln::load_early(scale_table + at),
                                 kiln::load_early(rank_table + at),
                                 size,
                                 tile};
  if (own.rank == 0) return kiln::pdl_wait();
  kiln::add_tile(own, block * width + int(threadIdx.x) / 32 * kiln::kWarpColumns);
}
