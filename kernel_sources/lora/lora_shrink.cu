// h[t, c] = sum_i x[t, i] * A[c, i] for each column c below the sum of the ranks of t's adapter
// x: [tokens, input_size], any row stride; h: [tokens, width] float32, width >= that sum
//
// A site's parts, such as q, k and v, have their own ranks; their columns of h follow each other.
// tile_tokens: [tiles, tile], tokens of one adapter each, -1 behind the last; tile: 16 or 32.
// tile_slots: [tiles], their adapter slots, -1 for an empty tile. rank_table, a_table:
// [num_parts, num_slots]; an offset in a_table counts elements of adapter_pool, where A
// [rank, input_size] begins. Compile-time parameters (jit_kernels/ops/lora/spec.py): SCALAR_T.
// Work split: an input row is cut into 8 slices. The warps of a slice take its groups of 32
// elements in turn. So only input_size sets the order of the additions. With spread = 1, one block
// computes 16 columns of a tile. With spread = 8, 8 blocks do: one slice each, and the last block
// to arrive adds the slices. Blocks without a token or a column exit at once.
// Memory: a block barrier separates the sums of the warps from the block that adds them. With
// spread = 8 the sums of the slices are in partials [tiles, gridDim.x, tile, 16]. arrivals
// [tiles, gridDim.x / 8] counts the slices that are done; it is 0 before and after the launch.
// Callers: columns of h without a rank keep their values, as do rows without an adapter.
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/memory.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

#include "lora/shrink_fma.cuh"
#include "lora/shrink_mma.cuh"

constexpr int kSlices = 8;  // of a row: SLICES in jit_kernels/ops/lora/spec.py

// Count this block in `arrivals`, and return whether the other slices are done. All threads of the
// block must call it, after a block barrier. shared: a word of shared memory.
KILN_FN bool is_last(uint32_t* arrivals, uint32_t* shared) {
  if (threadIdx.x == 0) *shared = kiln::arrive(arrivals, kSlices - 1);
  __syncthreads();
  return *shared == kSlices - 1;
}

extern "C" __global__ void __launch_bounds__(256, 2)
lora_shrink(float* h, const SCALAR_T* x, const SCALAR_T* adapter_pool, const int32_t* tile_slots,
            const int32_t* tile_tokens, const int32_t* rank_table, const int64_t* a_table,
            float* partials, uint32_t* arrivals, int64_t input_size, int64_t x_stride,
            int64_t h_stride, int num_parts, int num_slots, int tile, int warps, int spread) {
  kiln::pdl_reads_plan();
  const int place = int(blockIdx.x) / spread, column = place * kiln::kColumns;
  const int slot = kiln::load_early(tile_slots + blockIdx.y);
  const kiln::StackedRows<SCALAR_T> a(adapter_pool, rank_table, a_table, input_size, num_parts,
                                      num_slots, max(slot, 0));
  if (slot < 0 || !a.row(column)) return kiln::pdl_wait();
  const int elements = tile * kiln::kColumns, group_threads = 32 * warps;
  const int groups = int(blockDim.x) / group_threads, group = int(threadIdx.x) / group_threads;
  const auto shared = reinterpret_cast<float*>(kiln::dynamic_shared());
  const auto sums = shared + (group * warps) * elements;  // of each warp
  const int64_t first = (int64_t(blockIdx.y) * gridDim.x + place * spread) * elements;
  float* const slices = spread > 1 ? partials + first : shared + groups * warps * elements;
  const int32_t* tokens = tile_tokens + int64_t(blockIdx.y) * tile;
  const int size = (int(input_size) + 32 * kSlices - 1) / (32 * kSlices) * 32;
  const auto slice_of = [&](int s, int warp) {
    return kiln::Slice{min(s * size, int(input_size)), min((s + 1) * size, int(input_size)), warp,
                       warps};
  };
  const int own = int(threadIdx.x) / 32;
  if (spread == 1 && kiln::whole_slice(reinterpret_cast<kiln::Sums>(slices + own * elements), a,
                                       slice_of(own, 0), column, x, x_stride, tokens)) {
    __syncthreads();
  } else {
    for (int begin = int(blockIdx.x) % spread; begin < kSlices; begin += spread * groups) {
      const bool works = group < groups;  // the last warps may be too few for a slice
      const auto of_warp = reinterpret_cast<kiln::Sums>(sums + own % warps * elements);
      if (works)
        kiln::tile_sums(of_warp, a, slice_of(begin + group, own % warps), column, x, x_stride,
                        tokens, tile);
      __syncthreads();
      for (int i = int(threadIdx.x) % group_threads; works && i < elements; i += group_threads) {
        if (!a.row(column + i % kiln::kColumns)) continue;
        float total = sums[i];
        for (int w = 1; w < warps; ++w) total = kiln::add_rn(total, sums[w * elements + i]);
        slices[(begin + group) * elements + i] = total;
      }
      __syncthreads();  // the next slices reuse the sums
    }
  }
  kiln::pdl_launch_dependents();
  uint32_t* const arrived = arrivals + blockIdx.y * (gridDim.x / spread) + place;
  if (spread > 1 && !is_last(arrived, reinterpret_cast<uint32_t*>(shared))) return;
  for (int i = threadIdx.x; i < elements; i += blockDim.x) {
    const int c = i % kiln::kColumns, token = kiln::load_early(tokens + i / kiln::kColumns);
    if (token < 0 || !a.row(column + c)) continue;
    float total = slices[i];
#pragma unroll
    for (int s = 1; s < kSlices; ++s) total = kiln::add_rn(total, slices[s * elements + i]);
    h[token * h_stride + column + c] = total;
  }
}
