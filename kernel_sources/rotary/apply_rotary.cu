// (x[t, head, i], x[t, head, h + i]) = (x_i * c - x_(h+i) * s, x_(h+i) * c + x_i * s), in place
//   for query and key (NeoX); h = rotary_dim / 2, i < h,
//   (c, s) = cos_sin_table[positions[t], (i, h + i)]
//
// query: [tokens, query_heads, head_dim], key: [tokens, key_heads, head_dim], last dimension dense;
// positions: [tokens] int64; cos_sin_table: [max_position, rotary_dim] float32. Dimensions from
// rotary_dim on are unchanged. Compile-time parameters (jit_kernels/ops/rotary/spec.py): SCALAR_T.
// Work split: a block rotates some heads of token blockIdx.x. If all rows are 16-byte aligned, a
// thread rotates one vector of each half of a head, or of two heads; threadIdx.y is the head, which
// saves a division. Otherwise a thread rotates single elements.
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/rotate.cuh"
#include "kiln/rows/vec.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {

using Chunk = kiln::Chunk<SCALAR_T>;

struct Heads {  // of query and key, numbered together
  SCALAR_T *query, *key;
  int num_query, num_all;
  int64_t query_stride, query_head_stride, key_stride, key_head_stride;

  KILN_FN SCALAR_T* at(int64_t token, int head) const {
    return head < num_query ? query + token * query_stride + head * query_head_stride
                            : key + token * key_stride + (head - num_query) * key_head_stride;
  }
  KILN_FN bool aligned() const {
    const int64_t steps = query_stride | query_head_stride | key_stride | key_head_stride;
    return steps % Chunk::kSize == 0 && kiln::is_vector_aligned(query) &&
           kiln::is_vector_aligned(key);
  }
};

// Rotate one pair of elements at a time.
KILN_FN void rotate_elements(const Heads& heads, int64_t token, const float* row, int half) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  for (int pair = blockIdx.y * threads + thread; pair < heads.num_all * half;
       pair += threads * gridDim.y) {
    const int i = pair % half;
    SCALAR_T* x = heads.at(token, pair / half);
    const float a = kiln::to_float(x[i]), b = kiln::to_float(x[half + i]);
    kiln::from_float(kiln::rotated_first(a, b, row[i], row[half + i]), x[i]);
    kiln::from_float(kiln::rotated_second(a, b, row[i], row[half + i]), x[half + i]);
  }
}

struct Piece {  // a vector of each half of a head
  Chunk a, b;

  KILN_FN void load(const SCALAR_T* x, int half) {
    a = Chunk::load(x), b = Chunk::load(x + half);
  }
  KILN_FN void store_rotated(SCALAR_T* x, int half, const kiln::CosSin<Chunk::kSize>& angles) {
    angles.rotate(a, b, 0);
    a.store(x);
    b.store(x + half);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
apply_rotary(const int64_t* positions, SCALAR_T* query, SCALAR_T* key, const float* cos_sin_table,
             int heads, int kv_heads, int half, int64_t query_stride, int64_t query_head_stride,
             int64_t key_stride, int64_t key_head_stride) {
  kiln::pdl_wait_then_trigger();
  const Heads all = {query,        key,               heads,      heads + kv_heads,
                     query_stride, query_head_stride, key_stride, key_head_stride};
  const int64_t token = blockIdx.x, position = positions[token];
  const float* row = cos_sin_table + position * 2 * half;
  if (half != blockDim.x * Chunk::kSize || !all.aligned() ||
      !kiln::is_vector_aligned(cos_sin_table)) {
    rotate_elements(all, token, row, half);
    return;
  }
  const int head = blockIdx.y * blockDim.y + threadIdx.y, i = threadIdx.x * Chunk::kSize;
  if (head >= all.num_all) return;
  const int other = head + gridDim.y * blockDim.y;
  const bool two = other < all.num_all;
  SCALAR_T* x = all.at(token, head) + i;
  SCALAR_T* y = all.at(token, two ? other : head) + i;
  Piece first, second = {};  // in flight while the position loads
  first.load(x, half);
  if (two) second.load(y, half);
  kiln::CosSin<Chunk::kSize> angles;
  angles.load(row + i, row + half + i);
  first.store_rotated(x, half, angles);
  if (two) second.store_rotated(y, half, angles);
}
