// out[t, h, :] = v_scale sum_j softmax_j(cap(scale q[t, h, :] . k_j)) v_j, j: keys visible to t
// out, query: [num_tokens, num_heads, head_dim]; pools: blocks of 16 tokens, rows dense, any other
// strides; items: from attention_plan. head_dim: a multiple of 16 up to HEAD_TILE. Rows of query,
// pools and out start at multiples of 16 bytes. Compile-time parameters: SCALAR_T, KV_T, HEAD_TILE
// (jit_kernels/ops/attention_decode/spec.py).
//
// Work split: a block serves KV head blockIdx.x and every gridDim.y-th work item. Its warps divide
// the item's keys. Partial results of a row are merged in a binary tree that depends on the request
// alone, so a row's bits do not depend on the batch, the grid or the schedule. Requests that
// share the KV blocks of a part may have one item for it, of one token each: rows of a tile do not
// depend on each other. Their partial results are then merged request by request.
//
// Memory: each warp streams two KV blocks at a time through its own pipeline stages, so the main
// loop has no block barrier. Before pdl_wait a block reads only the plan and KV of earlier steps.
// The last warp to arrive at a tree node (atomic counter) merges it. If no block has two items, a
// mailbox replaces the counters: global memory where a sentinel value marks words not yet sent
// (merge.cuh). The block or cluster of a node's last parts then merges it, and waits for earlier
// blocks only. If a request has many parts, each cluster first merges its own two parts.
//
// Callers: between launches all words of `arrivals` are 0, and all of `mail` (mail_rows rows)
// kUnsent.
#include "attention_decode/attend.cuh"
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef KV_T
#define KV_T SCALAR_T
#endif
#ifndef HEAD_TILE
#define HEAD_TILE 128
#endif

namespace {

using Shape = kiln::DecodeShape<SCALAR_T, KV_T, HEAD_TILE>;
using kiln::WorkItem;

constexpr int kWarps = Shape::kWarps, kThreads = Shape::kThreads;
constexpr int kHalves = Shape::kHalves, kAhead = Shape::kAhead;

using Rows = kiln::QueryRows<Shape, SCALAR_T>;
using Inbox = kiln::Inbox<Shape>;
template <int N> struct RowGroups { static constexpr int kCount = N; };  // groups of 8 rows

}  // namespace

extern "C" __global__ void KILN_CLUSTER(1, 2, 1)
__launch_bounds__(kThreads, kiln::kLargeBlocks)
paged_attention(SCALAR_T* out, float* lse, const SCALAR_T* query, const KV_T* key_pool,
                const KV_T* value_pool, const int* block_table, const kiln::WorkItem* items,
                const float* sinks, float* partials, float* mail, uint32_t* arrivals,
                int64_t query_token, int64_t query_head, int64_t key_block, int64_t key_head,
                int64_t key_token, int64_t value_block, int64_t value_head, int64_t value_token,
                int64_t table_row, int capacity, int mail_rows, int group, int inverse_group,
                int head_dim, int window, float qk_scale_log2, float soft_cap_log2, float steepness,
                float v_scale) {
  kiln::pdl_reads_plan();
  __shared__ WorkItem own_items[kWarps][2];  // one copy for each warp: no barrier
  __shared__ int4 headers[kWarps];
  __shared__ kiln::Scale warp_scales[kWarps][kiln::kTileRows];
  __shared__ float query_scales[kiln::kTileRows];
  __shared__ kiln::ItemPlace item_place;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
  const kiln::Thread me = {warp, lane, lane / 4};
  const int num_kv_heads = gridDim.x;
  const kiln::HeadRows heads = {head, num_kv_heads, group * num_kv_heads, group, inverse_group};
  unsigned char* stages = kiln::dynamic_shared() + warp * Shape::kWarpBytes;
  unsigned char* queries = kiln::dynamic_shared() + kWarps * Shape::kWarpBytes;
  float* results = reinterpret_cast<float*>(kiln::dynamic_shared() + kAhead * Shape::kHalf);
  float* second_sums = reinterpret_cast<float*>(kiln::dynamic_shared());
  const kiln::Pools<KV_T> pools = {
      key_pool, value_pool, block_table, key_block, key_head, key_token, value_block, value_head,
      value_token, table_row, head_dim};
  const kiln::Results<SCALAR_T> to = {
      out, lse, sinks, partials, mail, mail_rows / 2, arrivals, head_dim, v_scale};
  const kiln::Queries<SCALAR_T> from = {query, query_token, query_head};
  const kiln::Softmax softmax = {qk_scale_log2, soft_cap_log2, steepness};
  const kiln::SharedBuffers<Shape> buffers = {queries, query_scales, item_place, results,
                                              warp_scales};
  kiln::Fetch<Shape> fetch(pools, me, stages, head);
  auto copy_item = [&](int at, int side) {
    if (lane < 4)
      kiln::copy_async_16(
          reinterpret_cast<unsigned char*>(&own_items[warp][side]) + lane * 16,
          reinterpret_cast<const unsigned char*>(items + 1 + min(at, capacity - 1)) + lane * 16);
  };

  copy_item(blockIdx.y, 0);
  if (lane == 4) kiln::copy_async_16(&headers[warp], items);
  kiln::copy_commit();
  kiln::copy_wait<0>();
  __syncwarp();  // the item has arrived
  const int first = blockIdx.y, num_items = headers[warp].x;
  const bool one_each =
      num_items <= int(gridDim.y) && headers[warp].y <= mail_rows / 2 && !headers[warp].z;
  if (first > 0 && first >= num_items) return;  // the SM is free for the next launch
  const WorkItem& first_item = own_items[warp][0];
  if (kiln::kPairs<Shape> && first < num_items && kiln::is_paired<Shape>(first_item, one_each)) {
    Inbox::clear(queries);
    kiln::cluster_arrive();
  }
  const kiln::Early early =
      kiln::Early::of(first < num_items ? fetch.begin(first_item) : 0, first_item, num_items);
  const Rows rows(first_item, from, heads, head_dim);
  const SCALAR_T* const own_chunk = rows.chunk(threadIdx.x);
#pragma unroll 1
  for (int i = 0;; ++i) {
    if (i == early.halves) {
      kiln::pdl_wait();  // before: reads only the plan, its inputs, and older KV
      kiln::pdl_launch_dependents();
      if (first >= num_items) return;
      rows.copy(queries, own_chunk);
    }
    if (i == kHalves) break;
    if (early.waits && 0 < i && i < early.halves) kiln::copy_wait<0>();
    fetch.first(first_item, i, sizeof(KV_T) > 1 && early.one_by_one && i < early.halves);
  }
  // Early halves precede the queries' commit group; their wait counts later groups: add empty ones.
  for (int i = kAhead; i < early.halves; ++i) kiln::copy_commit();

#pragma unroll 1
  for (int now = first, next, side = 0;; now = next, side ^= 1) {
    next = now + gridDim.y;
    const WorkItem &item = own_items[warp][side], &next_item = own_items[warp][side ^ 1];
    if (threadIdx.x == 0) item_place = kiln::ItemPlace::of<Shape>(to, heads, item, one_each);
    const kiln::MaskBounds bounds = kiln::MaskBounds::of(item, heads, fetch.num_keys, window);
    auto ready = [&] {
      kiln::copy_wait<kHalves - kAhead>();
      if constexpr (Shape::Tile::kWide)
        Rows(item, from, heads, head_dim).scale_to_fp16(queries, query_scales);
      __syncthreads();  // the queries have arrived
      copy_item(next, side ^ 1);
    };
    auto attend = [&](auto row_groups) {
      return kiln::attend<decltype(row_groups)::kCount, SCALAR_T>(fetch, item, heads, softmax,
                                                                  bounds, buffers, ready);
    };
    const kiln::ItemPlace place =
        bounds.last_row - bounds.first_row < 8 ? attend(RowGroups<1>()) : attend(RowGroups<2>());

    // Finish this item and start to fetch the next.
    const bool more = next < num_items;
    if (more) fetch.begin(next_item);
    kiln::ItemEnd<SCALAR_T, Shape> end(to, heads, item, me, place);
    if (more)
#pragma unroll 1
      for (int i = 0; i < kAhead; ++i) fetch.first(next_item, i);
    __syncthreads();  // all results are written, and the queries have been read
    if (more) {
      const Rows next_rows(next_item, from, heads, head_dim);
      next_rows.copy(queries, next_rows.chunk(threadIdx.x));
    }
    if (kiln::kPairs<Shape> && place.paired) {
      kiln::cluster_wait();  // the other block can receive
      end.merge_blocks(results, &warp_scales[0][0], Inbox::of(queries));
    } else {
      end.merge_warps(results, &warp_scales[0][0]);
    }
    __syncthreads();  // the results have been read
    if (more)
#pragma unroll 1
      for (int i = kAhead; i < kHalves; ++i) fetch.first(next_item, i);
#pragma unroll 1
    for (int left = place.num_requests; left > 0; --left, end.next_request())
      end.merge_parts(now, second_sums);
    if (!more) break;
  }
}
