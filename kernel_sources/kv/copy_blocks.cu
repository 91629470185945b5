// pool[p, pairs[i, 1], :] = pool[p, pairs[i, 0], :]      for every pool p and pair i, in bytes
//
// pool: [pools, blocks, block_bytes], blocks dense, 16-byte aligned and of a multiple of 16 bytes;
// pairs: [num_pairs, 2] int64: source, destination. No block is the destination of one pair and in
// another pair too. A pair with a negative source is padding. No compile-time parameters.
#include "kiln/vec.cuh"

namespace {

using Vec = kiln::Vec<uint8_t>;
constexpr int kInFlight = 4;  // vectors that a thread loads before it stores any

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
copy_blocks(uint8_t* pool, const int64_t* pairs, int64_t num_pairs, int64_t pools,
            int64_t block_bytes, int64_t pool_stride, int64_t block_stride) {
  const int64_t piece = int64_t(blockDim.x) * kInFlight * Vec::kSize;  // bytes of a block's turn
  const int64_t pieces = (block_bytes + piece - 1) / piece;
  for (int64_t turn = blockIdx.x; turn < num_pairs * pools * pieces; turn += gridDim.x) {
    const int64_t pair = turn / pieces / pools;
    const int64_t source = pairs[2 * pair], target = pairs[2 * pair + 1];
    if (source < 0) continue;
    uint8_t* blocks = pool + turn / pieces % pools * pool_stride;
    const uint8_t* from = blocks + source * block_stride;
    uint8_t* to = blocks + target * block_stride;
    const int64_t begin = turn % pieces * piece + threadIdx.x * Vec::kSize;
    const int64_t step = int64_t(blockDim.x) * Vec::kSize;
    Vec v[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (begin + u * step < block_bytes) v[u] = Vec::load(from + begin + u * step);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (begin + u * step < block_bytes) v[u].store(to + begin + u * step);
  }
}
