// h[t, c] = sum_i x[t, i] * A[c, i] for each column c below the sum of the ranks of t's adapter
// x: [tokens, input_size], any row stride; h: [tokens, width] float32, width >= that sum
//
// A site's parts, such as q, k and v, have their own ranks; their columns of h follow each other.
// token_slots: [tokens], the adapter slot of each token, -1 for none. rows: [num_parts], the rows
// of the site's parts in the tables. rank_table, a_table: [.., num_slots]; an offset in a_table
// counts elements of adapter_pool, where A [rank, input_size] begins. Compile-time parameters
// (jit_kernels/ops/lora/spec.py): SCALAR_T.
// Work split: a block computes kColumns columns of `tile` tokens, at most kRunTokens; neighbours of
// one adapter share what is loaded of A. Its threads split input_size, in an order that only
// input_size and SCALAR_T decide. Blocks without a column exit at once.
// Memory: one block barrier between the sums of the warps and their sum, one before their reuse.
// Callers: columns of h without a rank keep their values, as do rows without an adapter.
#include "kiln/math/reduce.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/vec.cuh"
#include "lora/runs.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

constexpr int kColumns = 4, kMostWarps = 16, kTokens = kiln::kRunTokens;
using Vector = kiln::Vec<SCALAR_T>;

// The first `left` elements from p on, then zeros. Not inlined: it is rare, and code takes time.
KILN_NOINLINE Vector elements_of(const SCALAR_T* p, int left) {
  Vector part;
#pragma unroll
  for (int j = 0; j < Vector::kSize; ++j) part.v[j] = j < left ? p[j] : SCALAR_T{};
  return part;
}

// 16 bytes of a row from element i on; zeros behind its end. The alignment changes no bits.
KILN_FN Vector part_of_row(const SCALAR_T* row, int64_t i, int64_t size) {
  if (kiln::is_vector_aligned(row) && i + Vector::kSize <= size) return Vector::load(row + i);
  return elements_of(row + i, int(min(size - i, int64_t(Vector::kSize))));
}

using Partial = float[kTokens][kColumns][kMostWarps];

// The rows of A for `count` columns from `first` on, for one adapter.
struct Columns {
  const SCALAR_T* a[kColumns];
  int count;

  KILN_FN Columns(const SCALAR_T* adapter_pool, const int32_t* rows, const int32_t* rank_table,
                  const int64_t* a_table, int64_t input_size, int num_parts, int num_slots,
                  int slot, int first) {
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
    count = min(end - first, kColumns);
  }
};

// Write the columns of `tokens` <= MOST rows of x, for tokens of one adapter. One token alone has its
// own code, without the branches.
template <int MOST>
KILN_FN void shrink_run(float* h, const SCALAR_T* x, const Columns& columns, int64_t input_size,
                        int64_t x_stride, int64_t h_stride, int tokens, Partial& partial) {
  float sum[MOST][kColumns] = {};
  const int step = int(blockDim.x) * Vector::kSize;
  for (int64_t i = int(threadIdx.x) * Vector::kSize; i < input_size; i += step) {
    Vector as[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (c < columns.count) as[c] = part_of_row(columns.a[c], i, input_size);
#pragma unroll
    for (int t = 0; t < MOST; ++t) {
      if (t && t >= tokens) continue;
      const Vector xs = part_of_row(x + t * x_stride, i, input_size);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c >= columns.count) continue;
#pragma unroll
        for (int j = 0; j < Vector::kSize; ++j)
          sum[t][c] = kiln::fma_rn(kiln::to_float(xs.v[j]), kiln::to_float(as[c].v[j]), sum[t][c]);
      }
    }
  }
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
  __syncthreads();  // the run before has read its sums
#pragma unroll
  for (int t = 0; t < MOST; ++t) {
    if (t && t >= tokens) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float of_warp = kiln::warp_sum(sum[t][c]);
      if (threadIdx.x % 32 == 0) partial[t][c][warp] = of_warp;
    }
  }
  __syncthreads();
  const int token = threadIdx.x / kColumns, column = threadIdx.x % kColumns;
  if (token < tokens && column < columns.count) {
    float total = partial[token][column][0];
    for (int w = 1; w < warps; ++w) total = kiln::add_rn(total, partial[token][column][w]);
    h[token * h_stride + column] = total;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1)
lora_shrink(float* h, const SCALAR_T* x, const SCALAR_T* adapter_pool, const int32_t* token_slots,
            const int32_t* rows, const int32_t* rank_table, const int64_t* a_table, int64_t tokens,
            int64_t input_size, int64_t x_stride, int64_t h_stride, int num_parts, int num_slots,
            int tile) {
  kiln::pdl_wait_then_trigger();
  __shared__ Partial partial;
  const int first = int(blockIdx.y) * kColumns;
  const int64_t begin = int64_t(blockIdx.x) * tile, end = min(begin + tile, tokens);
  kiln::for_each_run(token_slots, begin, end, [&](int slot, int64_t token, int count) {
    const Columns columns(adapter_pool, rows, rank_table, a_table, input_size, num_parts,
                          num_slots, slot, first);
    float* of_run = h + token * h_stride + first;
    const SCALAR_T* own = x + token * x_stride;
    if (columns.count <= 0) return;
    if (count == 1)
      shrink_run<1>(of_run, own, columns, input_size, x_stride, h_stride, count, partial);
    else
      shrink_run<kTokens>(of_run, own, columns, input_size, x_stride, h_stride, count, partial);
  });
}
