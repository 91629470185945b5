// out[t, start_p + o] += scale_p * sum_k h[t, first_p + k] * B_p[k, o] for each part p of a site
// out: [tokens, outputs], in place, any row stride; h: [tokens, width] float32, from lora_shrink
//
// start_p = part_starts[p], where part p's outputs begin; part_starts has num_parts + 1 elements.
// first_p: the sum of the ranks of the parts ahead. token_slots, rows and the tables are those of
// lora_shrink; scale_table has the scales, b_table the offsets of B [rank, outputs of p]. Each sum
// is rounded once, when it is added. Compile-time parameters (jit_kernels/ops/lora/spec.py):
// SCALAR_T.
// Work split: a block adds to some columns of one part for `tile` tokens, at most kRunTokens;
// neighbours of one adapter share what is loaded of B. Each thread sums over the rank, in its order.
// Columns move as 16-byte vectors if all rows are aligned. Blocks behind the last part exit at once.
// Memory: no thread reads what another writes.
// Callers: a row of out has one token.
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/vec.cuh"
#include "lora/runs.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

constexpr int kSize = kiln::Vec<SCALAR_T>::kSize, kTokens = kiln::kRunTokens;

// The rows of a run of tokens, and B and its sizes.
struct Run {
  SCALAR_T* out;  // the part's first column of the first token
  const float* h;
  const SCALAR_T* b;
  int64_t out_stride, h_stride;
  float scale;
  int tokens, rank, size;
};

// Add to the columns from `first` to `end` of a part, for a run of at most MOST tokens; N columns a
// thread. One token alone has its own code, without the branches.
template <int N, int MOST> KILN_FN void add_columns(const Run& run, int first, int end) {
  using Columns = kiln::Vec<SCALAR_T, N>;
  for (int o = first + int(threadIdx.x) * N; o < end; o += int(blockDim.x) * N) {
    float sum[MOST][N] = {};
#pragma unroll(MOST == 1 ? 4 : 2)
    for (int k = 0; k < run.rank; ++k) {
      const Columns weight = Columns::load(run.b + int64_t(k) * run.size + o);
#pragma unroll
      for (int t = 0; t < MOST; ++t) {
        if (t && t >= run.tokens) continue;
        const float own = run.h[t * run.h_stride + k];
#pragma unroll
        for (int j = 0; j < N; ++j)
          sum[t][j] = kiln::fma_rn(own, kiln::to_float(weight.v[j]), sum[t][j]);
      }
    }
#pragma unroll
    for (int t = 0; t < MOST; ++t) {
      if (t && t >= run.tokens) continue;
      SCALAR_T* row = run.out + t * run.out_stride + o;
      Columns y = Columns::load(row);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float more = kiln::mul_rn(sum[t][j], run.scale);
        kiln::from_float(kiln::add_rn(kiln::to_float(y.v[j]), more), y.v[j]);
      }
      y.store(row);
    }
  }
}

KILN_FN bool is_aligned(const Run& run) {
  return run.size % kSize == 0 && (run.tokens == 1 || run.out_stride % kSize == 0) &&
         kiln::is_vector_aligned(run.b) && kiln::is_vector_aligned(run.out);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128, 4)
lora_expand(SCALAR_T* out, const float* h, const SCALAR_T* adapter_pool, const int32_t* token_slots,
            const int32_t* rows, const int32_t* part_starts, const int32_t* rank_table,
            const float* scale_table, const int64_t* b_table, int64_t tokens, int64_t out_stride,
            int64_t h_stride, int num_parts, int num_slots, int tile) {
  kiln::pdl_wait_then_trigger();
  const int columns = int(blockDim.x) * kSize;
  int block = blockIdx.y, part = 0, start = 0, size = 0;  // this block's place in its part
  for (; part < num_parts; ++part) {
    start = part_starts[part];
    size = part_starts[part + 1] - start;
    const int blocks = (size + columns - 1) / columns;
    if (block < blocks) break;
    block -= blocks;
  }
  if (part == num_parts) return;
  const int first = block * columns, last = min(first + columns, size);
  const int64_t begin = int64_t(blockIdx.x) * tile, end = min(begin + tile, tokens);
  kiln::for_each_run(token_slots, begin, end, [&](int slot, int64_t token, int count) {
    int column = 0;  // the part's first column of h
    for (int ahead = 0; ahead < part; ++ahead)
      column += rank_table[int64_t(rows[ahead]) * num_slots + slot];
    const int64_t at = int64_t(rows[part]) * num_slots + slot;
    const int rank = rank_table[at];
    if (rank == 0) return;
    const Run run{out + token * out_stride + start,
                  h + token * h_stride + column,
                  adapter_pool + b_table[at],
                  out_stride,
                  h_stride,
                  scale_table[at],
                  count,
                  rank,
                  size};
    if (!is_aligned(run)) add_columns<1, kTokens>(run, first, last);
    else if (count == 1) add_columns<kSize, 1>(run, first, last);
    else add_columns<kSize, kTokens>(run, first, last);
  });
}
