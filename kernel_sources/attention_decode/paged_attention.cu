// out[t, h, :] = v_scale sum_j softmax_j(cap(scale q[t, h, :] . k_j)) v_j, j the keys that t sees
//
// out, query: [num_tokens, num_heads, head_dim]; pools: blocks of 16 tokens, rows dense, any other
// strides; items: attention_plan's. head_dim: a multiple of 16 up to HEAD_TILE. Query, pools and
// out start every row at a multiple of 16 bytes. Compile-time parameters: SCALAR_T, KV_T,
// HEAD_TILE (jit_kernels/ops/attention_decode.py).
//
// Logits are in log2 units: scale and the cap c (0: none) come times log2(e), steepness is 2 / c.
//
// A block serves one KV head, blockIdx.x, and every gridDim.y-th item. A warp eats one block of the
// pool at a time through stages of its own, so the loop has no block barrier; the first blocks of
// the next item are on their way while this one is merged. A row of a request's splits is merged by
// whichever warp arrives last of those that hold it, in the order of the splits: its bits depend on
// its own request, not on the batch, the grid or the schedule.
#include "kiln/attention_rows.cuh"
#include "kiln/ptx_async.cuh"
#include "kiln/ptx_launch.cuh"
#include "kiln/ptx_memory.cuh"

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

using Tile = kiln::AttentionTile<SCALAR_T, KV_T, HEAD_TILE>;
using kiln::finite;
using kiln::Float4;
using kiln::Scale;

constexpr uint32_t kWarp = 0xffffffffu;
constexpr int kFanBits = 5;  // 32 partial results are merged at once; more splits as a tree
constexpr int kRows = kiln::kTileRows, kBlock = kiln::kKVBlock, kChunks = Tile::kChunks;
constexpr int kWarps = HEAD_TILE <= 128 ? 4 : 2, kThreads = kWarps * 32;
constexpr int kSlot = 2 * Tile::kBytes;  // a stage: keys and values of a block
// A warp's result takes the place of its last stages, while blocks of the next item fill the first.
constexpr int kResultSlots = (kRows * Tile::kPitch * 4 + kSlot - 1) / kSlot;
constexpr int kFitting = 70 * 1024 / (kWarps * kSlot), kWanted = 2 + kResultSlots;
constexpr int kStages = kFitting < kWanted ? kFitting : kWanted, kAhead = kStages - kResultSlots;
constexpr int kLate = 2 * (kStages - kAhead);  // halves of stages that wait for the results to go
constexpr int kWarpBytes = kStages * kSlot;
static_assert(32 % kChunks == 0);  // a lane has the same 16 bytes of all rows that it copies
static_assert(kStages >= 2 && kAhead >= 1);

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 3)
paged_attention(SCALAR_T* out, float* lse, const SCALAR_T* query, const KV_T* key_pool,
                const KV_T* value_pool, const int* block_table, const kiln::WorkItem* items,
                const float* sinks, float* partials, Scale* scales, uint32_t* arrivals,
                int64_t query_token, int64_t query_head, int64_t key_block, int64_t key_head,
                int64_t key_token, int64_t value_block, int64_t value_head, int64_t value_token,
                int64_t table_row, int capacity, int group, int inverse_group, int head_dim,
                int window, float scale, float cap, float steepness, float v_scale) {
  kiln::pdl_wait();
  __shared__ kiln::WorkItem own_items[kWarps][2];  // each warp copies what it needs: no barrier
  __shared__ Scale warp_scales[kWarps][kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4;
  const int head = blockIdx.x, num_kv_heads = gridDim.x, num_heads = group * num_kv_heads;
  unsigned char* stages = kiln::dynamic_shared() + warp * kWarpBytes;
  unsigned char* queries = kiln::dynamic_shared() + kWarps * kWarpBytes;
  float* results = reinterpret_cast<float*>(kiln::dynamic_shared() + kAhead * kSlot);
  // Row i of all tiles is head i % group of token i / group.
  auto token_of = [&](int flat) { return int(unsigned(flat) * unsigned(inverse_group) >> 20); };

  // What this warp fetches: `count` blocks of an item, each kWarps after the last, with num_keys of
  // the request from the first on. A lane has looked up one of 32 ids, the next come in `ahead`.
  int count = 0, num_keys = 0, ids = 0, ahead = 0;
  const int* table = block_table;
  auto copy_item = [&](int at, int side) {
    if (lane < 4)
      kiln::copy_async_16(
          reinterpret_cast<unsigned char*>(&own_items[warp][side]) + lane * 16,
          reinterpret_cast<const unsigned char*>(items + 1 + min(at, capacity - 1)) + lane * 16);
  };
  auto look_up = [&](int i) { return i + lane < count ? table[(i + lane) * kWarps] : 0; };
  // The keys (half 0) or values (half 1) of block i, which has an id in the pool; a group.
  constexpr int kAtOnce = 32 / kChunks;  // rows
  const int own_column = lane % kChunks * (16 / int(sizeof(KV_T)));
  auto fetch = [&](int i, int half, int64_t id) {
    const KV_T* from = half ? value_pool + id * value_block + head * value_head
                            : key_pool + id * key_block + head * key_head;
    const int64_t token = half ? value_token : key_token;
    unsigned char* to = stages + i % kStages * kSlot + half * Tile::kBytes;
    // Rows past it are never read, nor columns past head_dim: there zeros come in their place.
    const int valid = own_column < head_dim ? num_keys - i * kWarps * kBlock : 0;
    from += lane / kChunks * token + own_column;
    to += lane / kChunks * Tile::kStep + lane % kChunks * 16;
#pragma unroll
    for (int row = 0; row < kBlock; row += kAtOnce, from += kAtOnce * token)
      kiln::copy_async_16(to + row * Tile::kStep, from, row + lane / kChunks < valid);
  };
  auto fetch_stages = [&](const kiln::WorkItem& item, int begin, int end) {
#pragma unroll 1
    for (int i = 2 * begin; i < 2 * end; ++i) {
      if (i / 2 < count) {
        const int known = warp + i / 2 * kWarps;
        fetch(i / 2, i % 2, known < kiln::kFirstIds ? item.ids[known] : table[i / 2 * kWarps]);
      }
      kiln::copy_commit();
    }
  };
  auto copy_queries = [&](const kiln::WorkItem& item) {
    const int start = (item.part >> 16) * kRows, rows = (item.size & 255) * group - start;
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * (HEAD_TILE / 8); i += kThreads) {
      const int row = i / (HEAD_TILE / 8), chunk = i % (HEAD_TILE / 8);
      const int token = token_of(start + row);
      const int64_t h = head * group + start + row - token * group;
      kiln::copy_async_16(
          queries + row * Tile::kQueryStep + chunk * 16,
          query + (item.first_token + token) * query_token + h * query_head + chunk * 8,
          row < rows && chunk * 8 < head_dim);
    }
    kiln::copy_commit();
  };

  copy_item(blockIdx.y, 0);
  kiln::copy_commit();
  if (lane < 4) kiln::store_vector(&own_items[warp][1].request + lane * 4, int4{0, 0, 0, 0});
  const int num_items = items[0].request;
  kiln::copy_wait<0>();
  __syncwarp();  // the item is there

  float o[HEAD_TILE / 8][4] = {};
  float top[2] = {}, sum[2] = {};
#pragma unroll 1
  for (int now = -1, next = blockIdx.y, side = 1;; now = next, next += gridDim.y, side ^= 1) {
    // Begin the next item, and end this one.
    const kiln::WorkItem &item = own_items[warp][side], &next_item = own_items[warp][side ^ 1];
    const bool more = next < num_items;
    if (more) {
      const int first = next_item.first_block + warp;
      count = max(0, (next_item.end_block - first + kWarps - 1) / kWarps);
      num_keys = next_item.seq_len - first * kBlock;
      table = block_table + next_item.request * table_row + first;
      fetch_stages(next_item, 0, kAhead);
      ahead = look_up(0);
    }
    const int num_splits = item.size >> 8, tile = item.part >> 16, split = item.part & 0xffff;
    const int flat_rows = (item.size & 255) * group;  // rows of all tiles
    const int num_rows = now < 0 ? 0 : min(kRows, flat_rows - tile * kRows);
    if (now >= 0) {
      Tile::spread(results + warp * (kWarpBytes / 4), o, num_rows, lane);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float total = kiln::quad_sum(sum[j]);
        if (lane % 4 == 0) warp_scales[warp][quad + 8 * j] = {top[j], total};
      }
    }
    __syncthreads();  // all results are there, and the queries have been read
    if (more) copy_queries(next_item);

    // Partial results: [split][row of all tiles][KV head], from the request's own start on.
    const int64_t base = (item.row_start + tile * kRows) * int64_t(num_kv_heads) + head;
    const int64_t split_rows = int64_t(flat_rows) * num_kv_heads;
    auto finish = [&](int row, int column, Float4 y, Scale whole) {
      const int flat = tile * kRows + row, token = token_of(flat);
      const int h = head * group + flat - token * group;
      const int64_t to = int64_t(item.first_token + token) * num_heads + h;
      const float f = kiln::end_row(lse && column == 0 ? lse + to : nullptr,
                                    sinks ? sinks + h : nullptr, whole, v_scale);
      kiln::store_row(out + to * head_dim + column, y, f);
    };
    // Merge the warps, in warp order; a warp takes every kWarps-th row.
#pragma unroll 1
    for (int row = warp; row < num_rows; row += kWarps) {
      Scale whole = {kiln::minus_infinity(), 0.0f};
      float weight[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) whole.top = fmaxf(whole.top, warp_scales[w][row].top);
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        weight[w] = kiln::exp2_fast(warp_scales[w][row].top - finite(whole.top));
        whole.sum += warp_scales[w][row].sum * weight[w];
      }
      const int64_t slot = base + split * split_rows + int64_t(row) * num_kv_heads;
#pragma unroll 1
      for (int column = lane * 4; column < head_dim; column += 128) {
        const float* from = results + row * Tile::kPitch + column;
        Float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
          y = kiln::add_scaled(y, kiln::load_vector<Float4>(from + w * (kWarpBytes / 4)),
                               weight[w]);
        if (num_splits == 1)
          finish(row, column, y, whole);
        else
          kiln::store_vector(partials + slot * head_dim + column, y);
      }
      if (num_splits > 1 && lane == 0) kiln::store_vector(scales + slot, whole);
    }
    __syncthreads();  // the results have been read
    // Blocks without work end at once. Were the next launch let in before this one's work is nearly
    // done, its first blocks, which have the work, would share the few places that are free then.
    if (now >= 0 && !more) kiln::pdl_launch_dependents();
    if (more) fetch_stages(next_item, kAhead, kStages);

    // Merge the splits, as a tree of 32 children a node: a warp's rows of a node by the last of its
    // children to arrive, in its first child's place.
    if (warp < num_rows && num_splits > 1) {
#pragma unroll 1
      for (int level = 0; 1 << level < num_splits; level += kFanBits) {
        const int node = split >> (level + kFanBits) << (level + kFanBits);
        const int children = min(1 << kFanBits, ((num_splits - node - 1) >> level) + 1);
        if (children == 1) continue;  // its state is in place already
        const int64_t arrival = now - split + node + (1 << level);
        __syncwarp();  // the warp's rows are written
        uint32_t before = 0;
        if (lane == 0)
          before = kiln::arrive(arrivals + (arrival * num_kv_heads + head) * kWarps + warp,
                                children - 1);
        before = __shfl_sync(kWarp, before, 0);
        if (int(before) != children - 1) break;
        __syncwarp();  // the other children's rows are seen
        const bool root = node == 0 && children > (num_splits - 1) >> level;
        const int64_t stride = split_rows << level;
#pragma unroll 1
        for (int row = warp; row < num_rows; row += kWarps) {
          const int64_t slot = base + node * split_rows + int64_t(row) * num_kv_heads;
          Scale own = {kiln::minus_infinity(), 0.0f};
          if (lane < children) own = kiln::load_vector<Scale>(scales + slot + lane * stride);
          Scale whole;
#pragma unroll 1
          for (int column = lane * 4; column - lane * 4 < head_dim; column += 128) {
            __syncwarp();  // tells the compiler that all lanes are here: else each shuffle is two
            const bool inside = column < head_dim;
            float* o_0 = partials + slot * head_dim + column;
            const Float4 y = kiln::gather(own, whole, children, o_0, stride * head_dim, inside);
            if (inside && root) finish(row, column, y, whole);
            if (inside && !root) kiln::store_vector(o_0, y);
          }
          if (!root && lane == 0) kiln::store_vector(scales + slot, whole);
        }
      }
    }
    if (!more) break;

    // This lane holds parts of rows quad and quad + 8, which see `window` keys before their limits.
    // Every row sees all keys of [all_begin, all_limit): no key there need be asked. Positions are
    // counted from the warp's first key.
    const int first_row = (next_item.part >> 16) * kRows, num_tokens = next_item.size & 255;
    const int last_row = min(first_row + kRows, num_tokens * group) - 1;
    const int before = num_keys - num_tokens + 1;
    int limit[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = first_row + quad + 8 * j;
      limit[j] = row <= last_row ? before + token_of(row) : -kBlock * kWarps;
    }
    const int all_limit = before + token_of(first_row);
    const int all_begin = window ? before + token_of(last_row) - window : 0;

    kiln::copy_wait<kLate>();
    __syncthreads();  // the queries are there
    uint32_t kept[Tile::kSteps][4];
    if constexpr (Tile::kKeepQuery) {
#pragma unroll
      for (int k = 0; k < Tile::kSteps; ++k) Tile::load_query(kept[k], queries, k, lane);
    }
    copy_item(next + gridDim.y, side);
    ids = ahead;
    ahead = look_up(32);

#pragma unroll
    for (int c = 0; c < HEAD_TILE / 8; ++c)
#pragma unroll
      for (int j = 0; j < 4; ++j) o[c][j] = 0.0f;
    top[0] = top[1] = kiln::minus_infinity(), sum[0] = sum[1] = 0.0f;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const int refill = i + kStages;
      if (refill % 32 == 0) {
        ids = ahead;
        ahead = look_up(refill + 32);
      }
      const int64_t id = __shfl_sync(kWarp, ids, refill % 32);
      const unsigned char* keys = stages + i % kStages * kSlot;
      kiln::copy_wait<2 * kStages - 1>();
      __syncwarp();  // the keys are there

      float logit[2][4] = {};  // [keys 0-7, 8-15][row quad: 2 keys, row quad + 8: 2 keys]
      Tile::multiply_keys(logit, kept, queries, keys, lane);
      __syncwarp();  // the keys have been read
      if (refill < count) fetch(refill, 0, id);
      kiln::copy_commit();
      const int key = i * kWarps * kBlock;
      const bool masked = key < all_begin || key + kBlock > all_limit;
      float best[2] = {top[0], top[1]};
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float y = logit[n][j] * scale;
          if (cap > 0) y = kiln::capped(y * steepness, cap);
          const int own = key + n * 8 + lane % 4 * 2 + j % 2;
          const bool old = window && own < limit[j / 2] - window;
          if (masked && (own >= limit[j / 2] || old)) y = kiln::minus_infinity();
          logit[n][j] = y;
          best[j / 2] = fmaxf(best[j / 2], y);
        }
#pragma unroll
      for (int j = 0; j < 2; ++j) best[j] = kiln::quad_max(best[j]);
      if (__any_sync(kWarp, best[0] > top[0] || best[1] > top[1])) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float f = kiln::exp2_fast(top[j] - finite(best[j]));
          top[j] = best[j];
          sum[j] *= f;
#pragma unroll
          for (int c = 0; c < HEAD_TILE / 8; ++c) o[c][2 * j] *= f, o[c][2 * j + 1] *= f;
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          logit[n][j] = kiln::exp2_fast(logit[n][j] - finite(best[j / 2]));
          sum[j / 2] += logit[n][j];
        }
      const uint32_t p[4] = {kiln::pack<SCALAR_T>(logit[0][0], logit[0][1]),
                             kiln::pack<SCALAR_T>(logit[0][2], logit[0][3]),
                             kiln::pack<SCALAR_T>(logit[1][0], logit[1][1]),
                             kiln::pack<SCALAR_T>(logit[1][2], logit[1][3])};
      kiln::copy_wait<2 * kStages - 1>();
      __syncwarp();  // the values are there
      Tile::add_values(o, p, keys + Tile::kBytes, lane);
      __syncwarp();  // the values have been read
      if (refill < count) fetch(refill, 1, id);
      kiln::copy_commit();
    }
    kiln::copy_commit();
    kiln::copy_wait<0>();
    __syncwarp();  // every lane is done with the stages, and the next item is there
  }
}
