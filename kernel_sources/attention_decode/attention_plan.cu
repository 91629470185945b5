// items[1..] = for r, tile, split: what a block must know to begin (kiln/attention_split.cuh)
//
// items: [1 + capacity] of 64 bytes, of which nothing past capacity is written; items[0] counts.
// block_table: [num_requests, ..]; seq_lens: [num_requests]; cu_seqlens_q: [num_requests + 1].
// A block writes the items of one request at a time, and adds up the others; the one after the last
// request writes the header. Of divisible requests the shares are items if no more than max_splits
// items come of it in all, else the splits. No compile-time parameters.
#include "kiln/attention_split.cuh"
#include "kiln/ptx_launch.cuh"
#include "kiln/ptx_warp.cuh"

namespace {

constexpr int kThreads = 128;
// Items and rows of partial results of the requests before one, undivided and divided, and
// the divided items of all requests.
struct Counts {
  int items, rows, divided_items, divided_rows, all_divided;

  KILN_FN void add(const Counts& x) {
    items += x.items, rows += x.rows, divided_items += x.divided_items;
    divided_rows += x.divided_rows, all_divided += x.all_divided;
  }
};

// The block's own request.
struct Own {
  kiln::RequestCut cut;
  int first_token, num_tokens, seq_len;
};

// The sum of x over the block; partial is free again at the block's next barrier.
KILN_FN Counts block_total(Counts x, Counts* partial) {
  x = {kiln::warp_total(x.items), kiln::warp_total(x.rows), kiln::warp_total(x.divided_items),
       kiln::warp_total(x.divided_rows), kiln::warp_total(x.all_divided)};
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = {0, 0, 0, 0, 0};
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) x.add(partial[warp]);
  return x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
attention_plan(kiln::WorkItem* items, const int* block_table, const int* seq_lens,
               const int* cu_seqlens_q, int64_t table_row, int num_requests, int capacity,
               int group, int window, int max_splits, int split_blocks, int few_splits,
               int warp_bits) {
  kiln::pdl_writes_plan();
  __shared__ Counts partial[kThreads / 32];
  __shared__ Own own;
  const kiln::SplitRule rule = {max_splits, split_blocks, few_splits, warp_bits};
#pragma unroll 1
  for (int request = blockIdx.x; request <= num_requests; request += gridDim.x) {
    Counts count = {0, 0, 0, 0, 0};
#pragma unroll 1
    for (int r = threadIdx.x; r < num_requests; r += kThreads) {
      const int first_token = cu_seqlens_q[r], tokens = cu_seqlens_q[r + 1] - first_token;
      const int seq_len = seq_lens[r];
      const kiln::RequestCut x = kiln::cut_request(tokens, seq_len, group, window, rule);
      if (r == request) own = {x, first_token, tokens, seq_len};
      if (!x.num_tiles) continue;
      const int divided = x.divisible ? x.num_splits << warp_bits : x.num_splits;
      count.all_divided += x.num_tiles * divided;
      if (r >= request) continue;
      count.items += x.num_tiles * x.num_splits;
      count.divided_items += x.num_tiles * divided;
      if (x.num_splits > 1) count.rows += x.num_splits * tokens * group;
      if (divided > 1) count.divided_rows += divided * tokens * group;
    }
    count = block_total(count, partial);
    const bool divides = count.all_divided <= max_splits;
    const int first_item = divides ? count.divided_items : count.items;
    const int first_row = divides ? count.divided_rows : count.rows;
    if (request == num_requests) {
      if (threadIdx.x == 0)
        kiln::store_vector(reinterpret_cast<int4*>(items),
                           int4{min(first_item, capacity), first_row, 0, 0});
      break;
    }

    const auto [x, first_token, num_tokens, seq_len] = own;
    const bool divided = divides && x.divisible;
    const kiln::Part kind = divided        ? kiln::Part::share
                            : x.divisible ? kiln::Part::split_in_units
                                          : kiln::Part::split;
    const int parts = divided ? x.num_splits << warp_bits : x.num_splits;
    const int room = min(x.num_tiles * parts, capacity - first_item);
    const int* table = block_table + request * table_row;
#pragma unroll 1
    for (int i = threadIdx.x; i < room; i += kThreads) {
      const int tile = i / parts, part = i % parts, split = divided ? part >> warp_bits : part;
      const int begin = x.begin(split), end = x.begin(split + 1);
      const int pairs = (end - begin + kiln::kPairBlocks - 1) / kiln::kPairBlocks;
      int ids[kiln::kFirstIds];
#pragma unroll
      for (int k = 0; k < kiln::kFirstIds; ++k) {
        const int unit = kiln::first_unit(kind, part, k / kiln::kPairBlocks, warp_bits);
        const int block = begin + kiln::unit_begin(unit, pairs, warp_bits) * kiln::kPairBlocks +
                          k % kiln::kPairBlocks;
        ids[k] = block < end ? table[block] : 0;
      }
      int4* to = reinterpret_cast<int4*>(items + 1 + first_item + i);
      const int size = parts << 8 | num_tokens, place = int(kind) << 29 | tile << 16 | part;
      kiln::store_vector(to, int4{request, first_token, size, seq_len});
      kiln::store_vector(to + 1, int4{place, first_row, begin, end});
      kiln::store_vector(to + 2, int4{ids[0], ids[1], ids[2], ids[3]});
      kiln::store_vector(to + 3, int4{ids[4], ids[5], ids[6], ids[7]});
    }
    __syncthreads();  // partial and own have been read
  }
}
