// items[1..] = for r, tile, split: what a block must know to begin (kiln/attention_split.cuh)
//
// items: [1 + capacity] of 64 bytes, of which nothing past capacity is written; items[0] counts.
// block_table: [num_requests, ..]; seq_lens: [num_requests]; cu_seqlens_q: [num_requests + 1].
// A block writes the items of one request at a time, and adds up the requests before it; the one
// after the last request writes the header. No compile-time parameters.
#include "kiln/attention_split.cuh"
#include "kiln/ptx_launch.cuh"

namespace {

constexpr uint32_t kAll = 0xffffffffu;
constexpr int kThreads = 128;
struct Pair { int items, rows; };

// The sum of x over the block; partial is free again at the block's next barrier.
KILN_FN Pair block_total(Pair x, Pair* partial) {
  for (int m = 16; m; m /= 2) {
    x.items += __shfl_xor_sync(kAll, x.items, m);
    x.rows += __shfl_xor_sync(kAll, x.rows, m);
  }
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = {0, 0};
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) {
    x.items += partial[warp].items;
    x.rows += partial[warp].rows;
  }
  return x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
attention_plan(kiln::WorkItem* items, const int* block_table, const int* seq_lens,
               const int* cu_seqlens_q, int64_t table_row, int num_requests, int capacity,
               int group, int window, int max_splits, int split_blocks, int few_splits) {
  kiln::take_turn();
  __shared__ Pair partial[kThreads / 32];
  const kiln::SplitRule rule = {max_splits, split_blocks, few_splits};
#pragma unroll 1
  for (int request = blockIdx.x; request <= num_requests; request += gridDim.x) {
    int first_token = 0, num_tokens = 0, seq_len = 0;
    if (request < num_requests) {
      first_token = cu_seqlens_q[request];
      num_tokens = cu_seqlens_q[request + 1] - first_token;
      seq_len = seq_lens[request];
    }
    Pair before = {0, 0};
#pragma unroll 1
    for (int r = threadIdx.x; r < request; r += kThreads) {
      const int tokens = cu_seqlens_q[r + 1] - cu_seqlens_q[r];
      const kiln::RequestCut x = kiln::cut_request(tokens, seq_lens[r], group, window, rule);
      before.items += x.num_tiles * x.num_splits;
      if (x.num_tiles && x.num_splits > 1) before.rows += x.num_splits * tokens * group;
    }
    before = block_total(before, partial);
    if (request == num_requests) {
      if (threadIdx.x == 0)
        kiln::store_vector(reinterpret_cast<int4*>(items),
                           int4{min(before.items, capacity), before.rows, 0, 0});
      break;
    }

    const kiln::RequestCut x = kiln::cut_request(num_tokens, seq_len, group, window, rule);
    const int room = min(x.num_tiles * x.num_splits, capacity - before.items);
    const int* table = block_table + request * table_row;
#pragma unroll 1
    for (int i = threadIdx.x; i < room; i += kThreads) {
      const int tile = i / x.num_splits, split = i % x.num_splits;
      const int begin = x.begin(split), end = x.begin(split + 1);
      int ids[kiln::kFirstIds];
#pragma unroll
      for (int k = 0; k < kiln::kFirstIds; ++k) ids[k] = begin + k < end ? table[begin + k] : 0;
      int4* to = reinterpret_cast<int4*>(items + 1 + before.items + i);
      const int size = x.num_splits << 8 | num_tokens;
      kiln::store_vector(to, int4{request, first_token, size, seq_len});
      kiln::store_vector(to + 1, int4{tile << 16 | split, before.rows, begin, end});
      kiln::store_vector(to + 2, int4{ids[0], ids[1], ids[2], ids[3]});
      kiln::store_vector(to + 3, int4{ids[4], ids[5], ids[6], ids[7]});
    }
    __syncthreads();  // partial has been read
  }
}
