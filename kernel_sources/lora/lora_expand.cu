// out[t, start_p + o] += scale_p * sum_k h[t, first_p + k] * B_p[k, o] for each part p of a site
// out: [tokens, outputs], in place, any row stride; h: [tokens, width] float32, from lora_shrink
//
// start_p = part_starts[p], where part p's outputs begin; part_starts has num_parts + 1 elements.
// first_p: the sum of the ranks of the parts ahead. token_slots, rows and the tables are those of
// lora_shrink; scale_table has the scales, b_table the offsets of B [rank, outputs of p]. Each sum
// is rounded once, when it is added. Compile-time parameters (jit_kernels/ops/lora/spec.py):
// SCALAR_T.
// Work split: a block adds to a tile of one part's columns of one token; each thread sums over the
// rank, in its order. A tile moves as 16-byte vectors if all of its rows are aligned. Blocks beyond
// the last tile, and those whose part has no rank, exit at once.
// Memory: no thread reads what another writes.
// Callers: a row of out has one token.
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/vec.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

constexpr int kSize = kiln::Vec<SCALAR_T>::kSize;

// Add to the columns from `first` to `end` of a part of `size` columns; N columns a thread.
template <int N>
KILN_FN void add_columns(SCALAR_T* out, const float* h, const SCALAR_T* b, float scale, int rank,
                         int size, int first, int end) {
  using Columns = kiln::Vec<SCALAR_T, N>;
  for (int o = first + int(threadIdx.x) * N; o < end; o += int(blockDim.x) * N) {
    float sum[N] = {};
#pragma unroll 4
    for (int k = 0; k < rank; ++k) {
      const Columns weight = Columns::load(b + int64_t(k) * size + o);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = kiln::fma_rn(h[k], kiln::to_float(weight.v[j]), sum[j]);
    }
    Columns y = Columns::load(out + o);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float more = kiln::mul_rn(sum[j], scale);
      kiln::from_float(kiln::add_rn(kiln::to_float(y.v[j]), more), y.v[j]);
    }
    y.store(out + o);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
lora_expand(SCALAR_T* out, const float* h, const SCALAR_T* adapter_pool, const int32_t* token_slots,
            const int32_t* rows, const int32_t* part_starts, const int32_t* rank_table,
            const float* scale_table, const int64_t* b_table, int64_t out_stride, int64_t h_stride,
            int num_parts, int num_slots) {
  kiln::pdl_wait_then_trigger();
  const int64_t token = blockIdx.x;
  const int slot = token_slots[token], columns = int(blockDim.x) * kSize;
  if (slot < 0) return;
  int tile = blockIdx.y, part = 0, column = 0;  // the tile of the part; the part's column of h
  int rank = 0, start = 0, size = 0;
  int64_t at = 0;
  for (; part < num_parts; ++part) {
    at = int64_t(rows[part]) * num_slots + slot;
    rank = rank_table[at];
    start = part_starts[part];
    size = part_starts[part + 1] - start;
    const int tiles = (size + columns - 1) / columns;
    if (tile < tiles) break;
    tile -= tiles;
    column += rank;
  }
  if (part == num_parts || rank == 0) return;
  const SCALAR_T* b = adapter_pool + b_table[at];
  const float* own = h + token * h_stride + column;
  SCALAR_T* y = out + token * out_stride + start;
  const int first = tile * columns, end = min(first + columns, size);
  const bool aligned =
      size % kSize == 0 && kiln::is_vector_aligned(b) && kiln::is_vector_aligned(y);
  const float scale = scale_table[at];
  if (aligned) add_columns<kSize>(y, own, b, scale, rank, size, first, end);
  else add_columns<1>(y, own, b, scale, rank, size, first, end);
}
