// items[1 + i] = (request, tile, first block, end block), heaviest first; items[0] = their number
// items: [1 + capacity] of 16 bytes, nothing is written past capacity; seq_lens: [num_requests];
// cu_seqlens_q: [num_requests + 1]. Requests of few query tokens have no tiles. No compile-time
// parameters.
// Work split: one block of 16 warps. Each warp places the tiles whose weight (number of keys) falls
// in one of up to 16 equal ranges of power-of-two width; within a range they keep the order of
// their requests. A formula gives the first tile of a range in each request. A lane finds the tile
// of its record by prefix sums, so no loop visits tiles one by one.
#include "attention_prefill/tiles.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/math/reduce.cuh"

namespace {

constexpr uint32_t kWarp = 0xffffffffu;
constexpr int kRanges = 16;

struct Batch {
  const int *seq_lens, *cu_seqlens_q;
  int num_requests, group, window;

  KILN_FN kiln::PrefillRequest load(int r) const {
    if (r >= num_requests) return {0, 0, 0, 0};
    return kiln::PrefillRequest::load(r, seq_lens, cu_seqlens_q, group);
  }
  // Upper limit of a tile's weight, the number of KV blocks before its end: what a window or a chunk
  // can reach. Weights never fall from a tile to the next.
  KILN_FN int most_weight() const {
    const int reach = max(window, -window) + kiln::kPrefillRows / group;  // keys
    return window ? reach / kiln::kKVBlock + 1 : 0x7fffffff;
  }
  // Return the first tile of at least this weight. The token of a tile's last row, except in the
  // last tile, is (tile * kPrefillRows + kPrefillRows - 1) / group.
  KILN_FN int first_tile(const kiln::PrefillRequest& x, int weight) const {
    const int token = (weight - 1) * kiln::kKVBlock - (x.seq_len - x.num_tokens);
    if (weight <= 0 || token <= 0) return weight > most_weight() ? x.num_tiles : 0;
    const bool none = token >= x.num_tokens || weight > most_weight();
    return none ? x.num_tiles : min(x.num_tiles, token * group / kiln::kPrefillRows);
  }
};

// Inclusive prefix sum over the warp.
KILN_FN int sum_upto(int x) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kWarp, x, d);
    if (int(threadIdx.x) % 32 >= d) x += below;
  }
  return x;
}
KILN_FN int largest(int x) {
#pragma unroll
  for (int m = 16; m; m >>= 1) x = max(x, __shfl_xor_sync(kWarp, x, m));
  return x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kRanges * 32)
prefill_plan(kiln::TileItem* items, const int* seq_lens, const int* cu_seqlens_q, int num_requests,
             int capacity, int group, int window) {
  kiln::pdl_wait_then_trigger();
  __shared__ int tops[kRanges], counts[kRanges];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Batch batch = {seq_lens, cu_seqlens_q, num_requests, group, window};

  int most = 0;
  for (int r = threadIdx.x; r < num_requests; r += blockDim.x) {
    const kiln::PrefillRequest x = batch.load(r);
    if (x.num_tiles) most = max(most, (x.seq_len + kiln::kKVBlock - 1) / kiln::kKVBlock);
  }
  most = largest(most);
  if (lane == 0) tops[warp] = most;
  __syncthreads();
  most = min(largest(tops[lane % kRanges]), batch.most_weight());
  const int shift = max(0, 28 - __clz(most));  // most >> shift is below kRanges
  const int low = (kRanges - 1 - warp) << shift, high = (kRanges - warp) << shift;

  int count = 0;
  for (int r = lane; r < num_requests; r += 32) {
    const kiln::PrefillRequest x = batch.load(r);
    count += batch.first_tile(x, high) - batch.first_tile(x, low);
  }
  count = __shfl_sync(kWarp, sum_upto(count), 31);
  if (lane == 0) counts[warp] = count;
  __syncthreads();
  const int upto = sum_upto(lane < kRanges ? counts[lane] : 0);
  const int all = __shfl_sync(kWarp, upto, 31);
  int at = __shfl_sync(kWarp, upto, warp) - count;

  for (int r0 = 0; r0 < num_requests; r0 += 32) {
    const kiln::PrefillRequest own = batch.load(r0 + lane);
    const int own_first = batch.first_tile(own, low);
    const int own_count = batch.first_tile(own, high) - own_first;
    const int own_end = sum_upto(own_count), total = __shfl_sync(kWarp, own_end, 31);
    for (int i0 = 0; i0 < total; i0 += 32) {
      const int i = i0 + lane;
      int from = 0;  // the last lane whose tiles begin at i or before
#pragma unroll
      for (int step = 16; step; step /= 2) {
        const int begin = __shfl_sync(kWarp, own_end - own_count, from + step);
        if (begin <= i) from += step;
      }
      kiln::PrefillRequest x;
      x.num_tokens = __shfl_sync(kWarp, own.num_tokens, from);
      x.seq_len = __shfl_sync(kWarp, own.seq_len, from);
      const int first = __shfl_sync(kWarp, own_first, from);
      const int end_of = __shfl_sync(kWarp, own_end, from);
      if (i >= total || at + i >= capacity) continue;
      const int tile = first + end_of - 1 - i;  // the last tile has the most keys
      const int end = x.end_block(tile, group);
      const kiln::TileItem item = {r0 + from, tile, min(x.begin_block(tile, group, window), end),
                                   end};
      kiln::store_vector(items + 1 + at + i, item);
    }
    at += total;
  }
  if (threadIdx.x == 0) kiln::store_vector(items, kiln::TileItem{min(all, capacity), 0, 0, 0});
}
