// lora_shrink for float32, with FMA: tensor cores have no float32.
#pragma once
#include "kiln/math/reduce.cuh"
#include "kiln/ptx/launch.cuh"
#include "lora/parts.cuh"

namespace kiln {

// Write this warp's partial sums of a tile. The warps of a slice take its groups of 32 elements in
// turn.
KILN_FN void tile_sums(Sums sums, const StackedRows<float>& a, Slice slice, int column,
                       const float* x, int64_t x_stride, const int32_t* tokens, int tile) {
  pdl_wait();
  const int first = slice.begin + 32 * slice.warp + int(threadIdx.x) % 32;
  constexpr int kFew = 4;  // columns, and tokens, whose sums are in registers
  for (int c = 0; c < kColumns; c += kFew) {
    const float* rows[kFew];
#pragma unroll
    for (int j = 0; j < kFew; ++j) rows[j] = a.row(column + c + j);
    for (int t = 0; t < tile && rows[0]; t += kFew) {
      float sum[kFew][kFew] = {};
      for (int i = first; i < slice.end; i += 32 * slice.warps) {
#pragma unroll
        for (int n = 0; n < kFew; ++n) {
          const int token = tokens[t + n];
          if (token < 0) continue;
          const float own = x[token * x_stride + i];
#pragma unroll
          for (int j = 0; j < kFew; ++j)
            if (rows[j]) sum[n][j] = fma_rn(own, rows[j][i], sum[n][j]);
        }
      }
#pragma unroll
      for (int n = 0; n < kFew; ++n)
#pragma unroll
        for (int j = 0; j < kFew; ++j) {
          const bool any = tokens[t + n] >= 0 && rows[j] && slice.begin < slice.end;
          const float of_warp = any ? warp_sum(sum[n][j]) : 0.0f;
          if (threadIdx.x % 32 == 0) sums[t + n][c + j] = of_warp;
        }
    }
  }
}

KILN_FN bool whole_slice(Sums, const StackedRows<float>&, Slice, int, const float*, int64_t,
                         const int32_t*) {
  return false;  // only tensor cores gain by it
}

}  // namespace kiln
