// items[1 + i] = WorkItem of the i-th (request, tile, part), what a block needs to start on it
// items: [1 + capacity] of 64 bytes (kiln/attention/split.cuh), items[0] the header. Nothing is
// written past capacity. block_table: [num_requests, ..]; seq_lens: [num_requests]; cu_seqlens_q:
// [num_requests + 1]; shared: [num_requests], from shared_blocks. No compile-time parameters.
// Work split: a block writes the items of one request at a time, and counts the items of earlier
// requests to find their offset. Up to 32 requests, each warp counts all: no barrier. One more
// block writes the header. Splits of divisible requests become quarters if the batch then has at
// most max_splits items, else halves under the same condition, else they stay whole. If they do and
// the batch has more items than that, neighbours that share the blocks of all splits but the last
// form a group: it has one item for each of these splits, and then each request's last one.
#include "kiln/attention/split.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/warp.cuh"

namespace {

constexpr int kThreads = 128;
// Sums over the requests before one, and (all_*) over all. more: items of divisible requests. rows:
// of partial results if nothing is divided; else other_rows counts those of requests that are not
// divisible, divisible_rows the rest. saved: items less if requests share splits. joined:
// bit i is set if the i-th request that may be in the own request's group joins the one before.
struct Counts {
  int items, more, rows, other_rows, divisible_rows, all_items, all_more, saved, all_saved, joined;

  KILN_FN void add(const Counts& x) {
    items += x.items, more += x.more, rows += x.rows, other_rows += x.other_rows;
    divisible_rows += x.divisible_rows, all_items += x.all_items, all_more += x.all_more;
    saved += x.saved, all_saved += x.all_saved, joined += x.joined;
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
          kiln::warp_total(x.all_more),       kiln::warp_total(x.saved),
          kiln::warp_total(x.all_saved),      kiln::warp_total(x.joined)};
}
// Return the sum of x over the block. `partial` may be reused after the block's next barrier.
KILN_FN Counts block_sum(Counts x, Counts* partial) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  x = {};
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) x.add(partial[warp]);
  return x;
}

// Inputs of the step, and the rule that cuts its requests.
struct Step {
  const int *seq_lens, *cu_seqlens_q, *shared;
  int num_requests, group, window, most_in_group;
  kiln::SplitRule rule;

  // Whether request r, cut as x, is in the group of the request before it. Groups do not cross
  // multiples of most_in_group.
  KILN_FN bool joins(int r, int tokens, const kiln::RequestCut& x) const {
    const int before = max(0, r - 1), other_tokens = cu_seqlens_q[r] - cu_seqlens_q[before];
    const int other_len = seq_lens[before], common = shared[r];  // loaded before any is needed
    if (window || r % most_in_group == 0 || tokens != 1 || other_tokens != 1) return false;
    if (x.num_splits < 2 || common < x.begin(x.num_splits - 1)) return false;
    return x.equal_but_for_the_end(kiln::cut_request(1, other_len, group, window, rule));
  }

  // Add request r to `count`. If r is the block's own `request`, set `own`.
  KILN_FN void count(int r, int request, Counts& count, Own& own) const {
    const int first_token = cu_seqlens_q[r], tokens = cu_seqlens_q[r + 1] - first_token;
    const int seq_len = seq_lens[r];
    const kiln::RequestCut x = kiln::cut_request(tokens, seq_len, group, window, rule);
    if (r == request) own = {x, first_token, tokens, seq_len};
    const int items = x.num_tiles * x.num_splits, more = x.divisible ? items : 0;
    const bool joined = joins(r, tokens, x);
    const int saved = joined ? x.num_splits - 1 : 0;
    const int place = r - request / most_in_group * most_in_group;
    if (joined && place >= 0 && place < most_in_group) count.joined |= 1 << place;
    count.all_items += items, count.all_more += more, count.all_saved += saved;
    if (r >= request || !items) return;
    const int rows = x.num_splits * tokens * group;
    count.items += items, count.more += more, count.saved += saved;
    if (x.num_splits > 1) count.rows += rows;
    if (x.divisible) count.divisible_rows += rows;
    else if (x.num_splits > 1) count.other_rows += rows;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
attention_plan(kiln::WorkItem* items, const int* block_table, const int* seq_lens,
               const int* cu_seqlens_q, const int* shared, int64_t table_row, int num_requests,
               int capacity, int group, int window, int max_splits, int split_blocks,
               int few_splits, int longer, int warp_bits) {
  kiln::pdl_writes_plan();
  __shared__ Counts partial[kThreads / 32];
  __shared__ Own shared_own;
  const bool few = num_requests <= 32;
  const kiln::SplitRule rule = {max_splits, split_blocks, few_splits, longer, warp_bits};
  const int most_in_group = max(1, kiln::kTileRows / 2 / group);
  const Step step = {seq_lens, cu_seqlens_q, shared, num_requests, group, window, most_in_group,
                     rule};
#pragma unroll 1
  for (int request = blockIdx.x; request <= num_requests; request += gridDim.x) {
    Counts count = {};
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
    const bool shares = count.all_items > max_splits && count.all_saved > 0;
    const int first_item = count.items + ((1 << halvings) - 1) * count.more -
                           (shares ? count.saved : 0);
    int first_row = halvings ? count.other_rows + (count.divisible_rows << halvings) : count.rows;
    if (request == num_requests) {
      if (threadIdx.x == 0)
        kiln::store_vector(reinterpret_cast<int4*>(items),
                           int4{min(first_item, capacity), first_row, shares, 0});
      break;
    }

    const auto [x, first_token, num_tokens, seq_len] = own;
    if (!x.divisible) halvings = 0;
    const kiln::Part kind = x.divisible ? kiln::Part(int(kiln::Part::split_in_units) + halvings)
                                        : kiln::Part::split;
    const int parts = x.num_splits << halvings;  // of each tile
    // The request's place in its group, and the size of the group.
    int own_place = 0, members = 1;
    if (shares) {
      const int place = request % most_in_group;
#pragma unroll 1
      while (count.joined >> (place - own_place) & 1) ++own_place;
      members = own_place + 1;
#pragma unroll 1
      while (count.joined >> (place + members - own_place) & 1) ++members;
    }
    const int skipped = own_place > 0 ? parts - 1 : 0;  // parts that the group's first request has
    first_row -= own_place * parts * group;             // of the group
    const int room = min(x.num_tiles * parts - skipped, capacity - first_item);
    const int* table = block_table + request * table_row;
#pragma unroll 1
    for (int i = threadIdx.x; i < room; i += kThreads) {
      const int tile = (i + skipped) / parts, part = (i + skipped) % parts;
      const int split = part >> halvings;
      const bool is_shared = members > 1 && part < parts - 1;
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
      const int tokens = is_shared ? members : num_tokens;
      const int others = is_shared ? 0 : members - 1;
      const int size = parts << 8 | others << 5 | tokens;
      const int place = int(kind) << 29 | int(is_shared) << 28 | tile << 16 | part;
      // Every token sees all keys of a shared split.
      const int keys = is_shared ? end * kiln::kKVBlock + members : seq_len;
      kiln::store_vector(to, int4{request, first_token, size, keys});
      kiln::store_vector(to + 1, int4{place, first_row + own_place * group, begin, end});
      kiln::store_vector(to + 2, int4{ids[0], ids[1], ids[2], ids[3]});
      kiln::store_vector(to + 3, int4{ids[4], ids[5], ids[6], ids[7]});
    }
    if (!few) __syncthreads();  // partial and shared_own have been read
  }
}
