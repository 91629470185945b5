// items[1 + i] = WorkItem of the i-th (request, tile, part), what a block needs to start on it
// items: [1 + capacity] of 64 bytes (kiln/attention/split.cuh), items[0] the header. Nothing is
// written past capacity. block_table: [num_requests, ..]; seq_lens: [num_requests]; cu_seqlens_q:
// [num_requests + 1]. No compile-time parameters.
// Work split: a block writes the items of one request at a time, and counts the items of earlier
// requests to find their offset. Up to 32 requests, each warp counts all: no barrier. One more
// block writes the header. Splits of divisible requests become quarters if the batch then has at
// most max_splits items, else halves under the same condition, else they stay whole.
#include "kiln/attention/split.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/warp.cuh"

namespace {

constexpr int kThreads = 128;
// Sums over the requests before one, and (all_*) over all. more: items of divisible requests. rows:
// of partial results if nothing is divided; else other_rows counts those of requests that are not
// divisible, divisible_rows the rest.
struct Counts {
  int items, more, rows, other_rows, divisible_rows, all_items, all_more;

  KILN_FN void add(const Counts& x) {
    items += x.items, more += x.more, rows += x.rows, other_rows += x.other_rows;
    divisible_rows += x.divisible_rows, all_items += x.all_items, all_more += x.all_more;
  }
};

// Each block's own request.
struct Own {
  kiln::RequestCut cut;
  int first_token, num_tokens, seq_len;

  KILN_FN Own of_lane(int lane) const {
    auto get = [&](int x) { return __shfl_sync(0xffffffffu, x, lane); };
    return {{get(cut.first_block), get(cut.num_blocks), get(cut.num_tiles), get(cut.num_splits),
             get(cut.divisible) != 0},
            get(first_token), get(num_tokens), get(seq_len)};
  }
};

KILN_FN Counts warp_sum(const Counts& x) {
  return {kiln::warp_total(x.items),          kiln::warp_total(x.more),
          kiln::warp_total(x.rows),           kiln::warp_total(x.other_rows),
          kiln::warp_total(x.divisible_rows), kiln::warp_total(x.all_items),
          kiln::warp_total(x.all_more)};
}
// Return the sum of x over the block. `partial` may be reused after the block's next barrier.
KILN_FN Counts block_sum(Counts x, Counts* partial) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = {0, 0, 0, 0, 0, 0, 0};
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) x.add(partial[warp]);
  return x;
}

// Inputs of the step, and the rule that cuts its requests.
struct Step {
  const int *seq_lens, *cu_seqlens_q;
  int num_requests, group, window;
  kiln::SplitRule rule;

  // Add request r to `count`. If r is the block's own `request`, set `own`.
  KILN_FN void count(int r, int request, Counts& count, Own& own) const {
    const int first_token = cu_seqlens_q[r], tokens = cu_seqlens_q[r + 1] - first_token;
    const int seq_len = seq_lens[r];
    const kiln::RequestCut x = kiln::cut_request(tokens, seq_len, group, window, rule);
    if (r == request) own = {x, first_token, tokens, seq_len};
    const int items = x.num_tiles * x.num_splits, more = x.divisible ? items : 0;
    count.all_items += items, count.all_more += more;
    if (r >= request || !items) return;
    const int rows = x.num_splits * tokens * group;
    count.items += items, count.more += more;
    if (x.num_splits > 1) count.rows += rows;
    if (x.divisible) count.divisible_rows += rows;
    else if (x.num_splits > 1) count.other_rows += rows;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
attention_plan(kiln::WorkItem* items, const int* block_table, const int* seq_lens,
               const int* cu_seqlens_q, int64_t table_row, int num_requests, int capacity,
               int group, int window, int max_splits, int split_blocks, int few_splits,
               int longer, int warp_bits) {
  kiln::pdl_writes_plan();
  __shared__ Counts partial[kThreads / 32];
  __shared__ Own shared_own;
  const bool few = num_requests <= 32;
  const kiln::SplitRule rule = {max_splits, split_blocks, few_splits, longer, warp_bits};
  const Step step = {seq_lens, cu_seqlens_q, num_requests, group, window, rule};
#pragma unroll 1
  for (int request = blockIdx.x; request <= num_requests; request += gridDim.x) {
    Counts count = {0, 0, 0, 0, 0, 0, 0};
    Own own = {};
#pragma unroll 1
    for (int r = few ? threadIdx.x % 32 : threadIdx.x; r < num_requests; r += kThreads) {
      step.count(r, request, count, own);
    }
    if (few) {
      count = warp_sum(count);
      own = own.of_lane(request % 32);
    } else {
      if (threadIdx.x == request % kThreads) shared_own = own;
      count = block_sum(count, partial);
      own = shared_own;
    }
    int halvings = warp_bits;  // how often splits of divisible requests are halved
    while (halvings && count.all_items + ((1 << halvings) - 1) * count.all_more > max_splits)
      --halvings;
    const int first_item = count.items + ((1 << halvings) - 1) * count.more;
    const int first_row =
        halvings ? count.other_rows + (count.divisible_rows << halvings) : count.rows;
    if (request == num_requests) {
      if (threadIdx.x == 0)
        kiln::store_vector(reinterpret_cast<int4*>(items),
                           int4{min(first_item, capacity), first_row, 0, 0});
      break;
    }

    const auto [x, first_token, num_tokens, seq_len] = own;
    if (!x.divisible) halvings = 0;
    const kiln::Part kind = x.divisible ? kiln::Part(int(kiln::Part::split_in_units) + halvings)
                                        : kiln::Part::split;
    const int parts = x.num_splits << halvings;  // of each tile
    const int room = min(x.num_tiles * parts, capacity - first_item);
    const int* table = block_table + request * table_row;
#pragma unroll 1
    for (int i = threadIdx.x; i < room; i += kThreads) {
      const int tile = i / parts, part = i % parts, split = part >> halvings;
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
    if (!few) __syncthreads();  // partial and shared_own have been read
  }
}
