// pool[p, pairs[i, 1], :] = pool[p, pairs[i, 0], :]      for every pool p and pair i, in bytes
// pool: [pools, blocks, block_bytes], blocks dense, 16-byte aligned, in multiples of 16 bytes;
// pairs: [num_pairs, 2] int64: source, destination. The destination of a pair is in no other pair.
// A negative source marks padding. Grid: pieces of a block, pools, pairs. No compile-time
// parameters.
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/store.cuh"

namespace {

constexpr int kInFlight = 4;  // vectors that a thread loads before it stores any
struct alignas(16) Vector { uint32_t word[4]; };  // not bytes: they would be unpacked and repacked

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
copy_blocks(uint8_t* pool, const int64_t* pairs, int64_t num_pairs, int64_t block_bytes,
            int64_t pool_stride, int64_t block_stride) {
  kiln::pdl_writes_plan();  // writes blocks that attention reads before its pdl_wait
  kiln::pdl_launch_dependents_last();
  uint8_t* blocks = pool + blockIdx.y * pool_stride;
  const int step = blockDim.x * sizeof(Vector);
  const int64_t begin = int64_t(blockIdx.x) * kInFlight * step + threadIdx.x * sizeof(Vector);
  for (int64_t pair = blockIdx.z; pair < num_pairs; pair += gridDim.z) {
    const int64_t source = pairs[2 * pair], target = pairs[2 * pair + 1];
    if (source < 0) continue;
    const uint8_t* from = blocks + source * block_stride;
    uint8_t* to = blocks + target * block_stride;
    Vector v[kInFlight] = {};
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (begin + u * step < block_bytes) v[u] = kiln::load_vector<Vector>(from + begin + u * step);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u)
      if (begin + u * step < block_bytes) kiln::store_words(to + begin + u * step, v[u].word);
  }
}
