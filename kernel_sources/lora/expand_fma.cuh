// The lora_expand kernel without tensor cores. It is used for float32, and for rows whose alignment
// does not allow vector loads.
#pragma once
#include "kiln/ptx/early.cuh"
#include "kiln/ptx/launch.cuh"

namespace kiln {

constexpr int kWarpColumns = 64;  // of out: WARP_COLUMNS in jit_kernels/ops/lora/spec.py

// What a block works on: one tile, and one part of the site. out, h and b point to the part's first
// column.
template <class T> struct Tile {
  T* out;
  const float* h;
  const T* b;
  const int32_t* tokens;
  int64_t out_stride, h_stride;
  float scale;
  int rank, size, count;  // size: columns of the part; count: length of tokens
};

// Add the adapter's part to this warp's columns, from `first` on, for all tokens of a tile. It
// calls pdl_wait before it reads h, B and out.
template <class T> KILN_FN void add_by_fma(const Tile<T>& tile, int first) {
  pdl_wait();
  pdl_launch_dependents();
  const int end = min(first + kWarpColumns, tile.size);
#pragma unroll 1
  for (int place = 0; place < tile.count; ++place) {
    const int token = load_early(tile.tokens + place);
    if (token < 0) return;
    const float* h = tile.h + token * tile.h_stride;
#pragma unroll 1
    for (int o = first + int(threadIdx.x) % 32; o < end; o += 32) {
      float sum = 0;
#pragma unroll 4
      for (int k = 0; k < tile.rank; ++k)
        sum = fma_rn(h[k], to_float(tile.b[int64_t(k) * tile.size + o]), sum);
      T& y = tile.out[token * tile.out_stride + o];
      from_float(add_rn(to_float(y), mul_rn(sum, tile.scale)), y);
    }
  }
}
KILN_FN void add_tile(const Tile<float>& tile, int first) { add_by_fma(tile, first); }

}  // namespace kiln
