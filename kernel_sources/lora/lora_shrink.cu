// h[t, c] = sum_i x[t, i] * A[c, i] for each column c below the sum of the ranks of t's adapter
// x: [tokens, input_size], any row stride; h: [tokens, width] float32, width >= that sum
//
// A site's parts, such as q, k and v, have their own ranks; their columns of h follow each other.
// token_slots: [tokens], the adapter slot of each token, -1 for none. rows: [num_parts], the rows
// of the site's parts in the tables. rank_table, a_table: [.., num_slots]; an offset in a_table
// counts elements of adapter_pool, where A [rank, input_size] begins. Compile-time parameters
// (jit_kernels/ops/lora/spec.py): SCALAR_T.
// Work split: a block computes kColumns columns of one token; its threads split input_size, in an
// order that only input_size and SCALAR_T decide. Blocks without a column exit at once.
// Memory: one block barrier, between the sums of the warps and their sum.
// Callers: columns of h without a rank keep their values, as do rows without an adapter.
#include "kiln/math/reduce.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/vec.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

constexpr int kColumns = 4, kMostWarps = 16;
using Vector = kiln::Vec<SCALAR_T>;

// 16 bytes of a row from element i on; zeros behind its end. The alignment changes no bits.
KILN_FN Vector part_of_row(const SCALAR_T* row, int64_t i, int64_t size) {
  if (kiln::is_vector_aligned(row) && i + Vector::kSize <= size) return Vector::load(row + i);
  Vector part;
#pragma unroll
  for (int j = 0; j < Vector::kSize; ++j) part.v[j] = i + j < size ? row[i + j] : SCALAR_T{};
  return part;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512)
lora_shrink(float* h, const SCALAR_T* x, const SCALAR_T* adapter_pool, const int32_t* token_slots,
            const int32_t* rows, const int32_t* rank_table, const int64_t* a_table,
            int64_t input_size, int64_t x_stride, int64_t h_stride, int num_parts, int num_slots) {
  kiln::pdl_wait_then_trigger();
  __shared__ float partial[kColumns][kMostWarps];
  const int64_t token = blockIdx.x;
  const int slot = token_slots[token], first = int(blockIdx.y) * kColumns;
  if (slot < 0) return;
  const SCALAR_T* a[kColumns] = {};  // the rows of A for this block's columns
  int end = 0;
  for (int part = 0; part < num_parts; ++part) {
    const int64_t at = int64_t(rows[part]) * num_slots + slot;
    const int rank = rank_table[at];
    if (end < first + kColumns && first < end + rank) {
      const SCALAR_T* own = adapter_pool + a_table[at];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int row = first + c - end;
        if (row >= 0 && row < rank) a[c] = own + row * input_size;
      }
    }
    end += rank;
  }
  if (first >= end) return;

  float sum[kColumns] = {};
  const SCALAR_T* own = x + token * x_stride;
  const int step = int(blockDim.x) * Vector::kSize;
  for (int64_t i = int(threadIdx.x) * Vector::kSize; i < input_size; i += step) {
    const Vector xs = part_of_row(own, i, input_size);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (first + c >= end) continue;
      const Vector as = part_of_row(a[c], i, input_size);
#pragma unroll
      for (int j = 0; j < Vector::kSize; ++j)
        sum[c] = kiln::fma_rn(kiln::to_float(xs.v[j]), kiln::to_float(as.v[j]), sum[c]);
    }
  }
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  __syncwarp();
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    sum[c] = kiln::warp_sum(sum[c]);
    if (threadIdx.x % 32 == 0) partial[c][warp] = sum[c];
  }
  __syncthreads();
  const int column = threadIdx.x;
  if (column < kColumns && first + column < end) {
    float total = partial[column][0];
    for (int w = 1; w < warps; ++w) total = kiln::add_rn(total, partial[column][w]);
    h[token * h_stride + first + column] = total;
  }
}
