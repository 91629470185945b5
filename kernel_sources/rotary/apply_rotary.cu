// NeoX rotation, in place, of query and key in one launch. With h = rotary_dim / 2, i < h,
// c = table[positions[t], i], s = table[positions[t], h + i]:
//   (x[t, head, i], x[t, head, h + i]) = (x_i * c - x_(h+i) * s, x_(h+i) * c + x_i * s)
//
// query: [tokens, query_heads, head_dim], key: [tokens, key_heads, head_dim], last dimension dense;
// positions: [tokens] int64; table: [max_position, rotary_dim] float32. Dimensions of a head past
// rotary_dim stay as they are. Compile-time parameters (jit_kernels/ops/rotary.py): SCALAR_T.
#include "kiln/ptx.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

extern "C" __global__ void __launch_bounds__(256)
apply_rotary(const int64_t* positions, SCALAR_T* query, SCALAR_T* key, const float* table,
             int64_t tokens, int query_heads, int key_heads, int half, int64_t query_stride,
             int64_t query_head_stride, int64_t key_stride, int64_t key_head_stride) {
  const int pairs = (query_heads + key_heads) * half;
  for (int64_t token = blockIdx.x; token < tokens; token += gridDim.x) {
    const float* row = table + positions[token] * 2 * half;
    for (int pair = threadIdx.x; pair < pairs; pair += blockDim.x) {
      const int head = pair / half, i = pair % half;
      SCALAR_T* x = head < query_heads
                        ? query + token * query_stride + head * query_head_stride
                        : key + token * key_stride + (head - query_heads) * key_head_stride;
      const float a = kiln::to_float(x[i]), b = kiln::to_float(x[half + i]);
      const float c = row[i], s = row[half + i];
      kiln::from_float(a * c - b * s, x[i]);
      kiln::from_float(b * c + a * s, x[half + i]);
    }
  }
}
