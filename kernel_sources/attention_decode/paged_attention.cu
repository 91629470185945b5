// out[t, h, :] = v_scale sum_j softmax_j(cap(scale q[t, h, :] . k_j)) v_j, j the keys that t sees
//
// out, query: [num_tokens, num_heads, head_dim]; pools: blocks of 16 tokens, rows dense, any other
// strides; items: attention_plan's. head_dim: a multiple of 16 up to HEAD_TILE. Query, pools and
// out start every row at a multiple of 16 bytes. Compile-time parameters: SCALAR_T, KV_T,
// HEAD_TILE (jit_kernels/ops/attention_decode.py).
//
// Logits are in log2 units: scale and the cap c (0: none) come times log2(e), steepness is 2 / c.
//
// A block serves one KV head, blockIdx.x, and every gridDim.y-th item. A warp eats a pair of blocks
// of the pool at a time through stages of its own, so the loop has no block barrier; the first keys
// of the next item are on their way while this one is merged. A row of a request's parts is merged
// in the order of the parts, by whichever warp arrives last of those that hold it. Or, where no
// block has two items, by the block of the last part: the others, blocks before it, send it theirs.
// A split of which one block has all shares is added up in the same steps as one of which each has
// one. A row's bits depend on its own request, not on the batch, the grid or the schedule. Between
// launches `arrivals` is all 0, and `mail`, of mail_rows, all kUnsent.
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
using kiln::Part;
using kiln::Scale;

constexpr uint32_t kWarp = 0xffffffffu;
constexpr int kFanBits = 5;  // 32 partial results are merged at once; more splits as a tree
constexpr int kRows = kiln::kTileRows, kBlock = kiln::kKVBlock, kChunks = Tile::kChunks;
constexpr int kWarpBits = HEAD_TILE <= 128 ? 2 : 1, kWarps = 1 << kWarpBits;
constexpr int kThreads = kWarps * 32;
// A stage has two halves, keys and values of a pair of blocks, that are filled in turn. A warp's
// result takes the place of its last halves, while keys of the next item fill the first.
constexpr int kPair = kiln::kPairBlocks, kHalf = Tile::kBytes;
constexpr int kResultHalves = (kRows * Tile::kPitch * 4 + kHalf - 1) / kHalf;
constexpr int kFitting = 70 * 1024 / (kWarps * kHalf), kWanted = 4;
constexpr int kHalves = kFitting < kWanted ? kFitting : kWanted, kAhead = kHalves - kResultHalves;
constexpr int kWarpBytes = kHalves * kHalf, kIds = 32 / kPair;  // pairs whose ids a warp has
constexpr int kKeys = kPair * kBlock;
static_assert(32 % kChunks == 0);  // a lane has the same 16 bytes of all rows that it copies
static_assert(kHalves >= 2 && kAhead >= 1);

template <int N> struct Eights { static constexpr int kCount = N; };  // of rows

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, kiln::kLargeBlocks)
paged_attention(SCALAR_T* out, float* lse, const SCALAR_T* query, const KV_T* key_pool,
                const KV_T* value_pool, const int* block_table, const kiln::WorkItem* items,
                const float* sinks, float* partials, float* mail, uint32_t* arrivals,
                int64_t query_token, int64_t query_head, int64_t key_block, int64_t key_head,
                int64_t key_token, int64_t value_block, int64_t value_head, int64_t value_token,
                int64_t table_row, int capacity, int mail_rows, int group, int inverse_group,
                int head_dim, int window, float scale, float cap, float steepness, float v_scale) {
  kiln::pdl_reads_plan();
  __shared__ kiln::WorkItem own_items[kWarps][2];  // each warp copies what it needs: no barrier
  __shared__ int4 headers[kWarps];
  __shared__ Scale warp_scales[kWarps][kRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4;
  const int head = blockIdx.x, num_kv_heads = gridDim.x, num_heads = group * num_kv_heads;
  unsigned char* stages = kiln::dynamic_shared() + warp * kWarpBytes;
  unsigned char* queries = kiln::dynamic_shared() + kWarps * kWarpBytes;
  float* results = reinterpret_cast<float*>(kiln::dynamic_shared() + kAhead * kHalf);
  // Row i of all tiles is head i % group of token i / group.
  auto token_of = [&](int flat) { return int(unsigned(flat) * unsigned(inverse_group) >> 20); };

  // What this warp fetches: `count` pairs of blocks of an item, with num_keys of the request from
  // the first on. A lane has looked up one of 32 ids, the next come in `ahead`.
  int count = 0, num_keys = 0, ids = 0, ahead = 0;
  const int* table = block_table;
  auto first_unit = [&](const kiln::WorkItem& item) {
    return kiln::first_unit(item.kind(), item.part(), warp, kWarpBits);
  };
  auto unit_begin = [&](const kiln::WorkItem& item, int unit) {
    const int num_pairs = (item.end_block - item.first_block + kPair - 1) / kPair;
    return kiln::unit_begin(unit, num_pairs, kWarpBits);
  };
  auto copy_item = [&](int at, int side) {
    if (lane < 4)
      kiln::copy_async_16(
          reinterpret_cast<unsigned char*>(&own_items[warp][side]) + lane * 16,
          reinterpret_cast<const unsigned char*>(items + 1 + min(at, capacity - 1)) + lane * 16);
  };
  auto look_up = [&](int pair) {
    const int block = pair * kPair + lane;
    return block < count * kPair && block * kBlock < num_keys ? table[block] : 0;
  };
  // Half i: the keys (i even) or values of pair i / 2, whose blocks have ids in the pool; a group.
  constexpr int kAtOnce = 32 / kChunks;  // rows
  const int own_column = lane % kChunks * (16 / int(sizeof(KV_T)));
  const bool dense = key_token == HEAD_TILE && value_token == HEAD_TILE && head_dim == HEAD_TILE;
  auto fetch = [&](int i, const int (&id)[kPair]) {
    const KV_T* pool = i % 2 ? value_pool + head * value_head : key_pool + head * key_head;
    const int64_t block = i % 2 ? value_block : key_block, token = i % 2 ? value_token : key_token;
    unsigned char* to =
        stages + i % kHalves * kHalf + lane / kChunks * Tile::kStep + lane % kChunks * 16;
    const int left = num_keys - i / 2 * kKeys;
    if (dense && left >= kKeys) {  // most often, and in the least code
#pragma unroll
      for (int m = 0; m < kPair; ++m) {
        const KV_T* from = pool + id[m] * block + lane / kChunks * HEAD_TILE + own_column;
#pragma unroll
        for (int row = 0; row < kBlock; row += kAtOnce)
          kiln::copy_async_16(to + (m * kBlock + row) * Tile::kStep, from + row * HEAD_TILE);
      }
      return;
    }
    // Rows past it are never read, nor columns past head_dim: there zeros come in their place.
    const int valid = own_column < head_dim ? left - lane / kChunks : 0;
#pragma unroll
    for (int m = 0; m < kPair; ++m) {
      const KV_T* from = pool + id[m] * block + lane / kChunks * token + own_column;
#pragma unroll 1
      for (int row = 0; row < kBlock; row += kAtOnce, from += kAtOnce * token)
        kiln::copy_async_16(to + (m * kBlock + row) * Tile::kStep, from, m * kBlock + row < valid);
    }
  };
  // Half i, if there is such a pair, whose ids a lane has in `ids`.
  auto fetch_next = [&](int i) {
    const int pair = i / 2;
    if (i % 2 == 0 && pair % kIds == 0) {
      ids = ahead;
      ahead = look_up(pair + kIds);
    }
    int id[kPair];
#pragma unroll
    for (int m = 0; m < kPair; ++m) id[m] = __shfl_sync(kWarp, ids, pair % kIds * kPair + m);
    if (pair < count) fetch(i, id);
    kiln::copy_commit();
  };
  // The same of an item's first halves; the ids of its first pair came with it.
  auto fetch_first = [&](const kiln::WorkItem& item, int begin, int end) {
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      int id[kPair];
#pragma unroll
      for (int m = 0; m < kPair; ++m)
        id[m] = i < 2 ? item.ids[warp * kPair + m] : __shfl_sync(kWarp, ids, i / 2 * kPair + m);
      if (i / 2 < count) fetch(i, id);
      kiln::copy_commit();
    }
  };
  // Have an item's first pair brought to the L2 cache: a hint, so no write to it comes too late.
  auto prefetch_first = [&](const kiln::WorkItem& item) {
    constexpr int kLine = 128 / int(sizeof(KV_T));
    const int row = lane / 2, column = HEAD_TILE > kLine ? lane % 2 * kLine : 0;
    const int64_t own_key = head * key_head + row * key_token + column;
    const int64_t own_value = head * value_head + row * value_token + column;
#pragma unroll
    for (int m = 0; m < kPair; ++m) {
      const int64_t id = item.ids[warp * kPair + m];
      kiln::prefetch(key_pool + id * key_block + own_key);
      kiln::prefetch(value_pool + id * value_block + own_value);
    }
  };
  auto copy_queries = [&](const kiln::WorkItem& item) {
    const int start = item.tile() * kRows, rows = item.num_tokens() * group - start;
    const int padded = (rows > 8 ? kRows : 8) * (HEAD_TILE / 8);  // as many as are multiplied
#pragma unroll 1
    for (int i = threadIdx.x; i < padded; i += kThreads) {
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
  if (lane < 4) kiln::store_vector(&own_items[warp][1].request + lane * 4, int4{0, 0, 0, 0});
  if (lane == 4) kiln::copy_async_16(&headers[warp], items);
  kiln::copy_commit();
  kiln::copy_wait<0>();
  __syncwarp();  // the item is there
  const int num_items = headers[warp].x;
  const bool one_each = num_items <= int(gridDim.y) && headers[warp].y <= mail_rows;
  if (int(blockIdx.y) < num_items) prefetch_first(own_items[warp][0]);
  kiln::pdl_wait();  // so far the plan was read, and nothing else

#pragma unroll 1
  for (int now = -1, next = blockIdx.y, side = 1;; now = next, next += gridDim.y, side ^= 1) {
    // Begin the next item, and end this one.
    const kiln::WorkItem &item = own_items[warp][side], &next_item = own_items[warp][side ^ 1];
    const bool more = next < num_items;
    if (more) {
      const int unit = first_unit(next_item), first_pair = unit_begin(next_item, unit);
      const int num_units = next_item.kind() == Part::share ? 1 : kWarps;
      count = unit_begin(next_item, unit + num_units) - first_pair;
      const int first = next_item.first_block + first_pair * kPair;
      num_keys = next_item.seq_len - first * kBlock;
      table = block_table + next_item.request * table_row + first;
      ids = look_up(0);
      ahead = look_up(kIds);
      if (now < 0) copy_queries(next_item);
      fetch_first(next_item, 0, now < 0 ? kHalves : kAhead);
    }
    const bool divided = item.kind() == Part::share;
    const int num_parts = item.num_parts(), tile = item.tile(), part = item.part();
    const bool mailed = one_each && num_parts <= 1 << kFanBits;
    const int flat_rows = item.num_tokens() * group;  // of all tiles
    const int num_rows = now < 0 ? 0 : min(kRows, flat_rows - tile * kRows);
    // Blocks without work end at once. Were the next launch let in before this one's work is nearly
    // done, its first blocks, which have the work, would share the few places that are free then.
    if (now >= 0 && !more && num_parts == 1) kiln::pdl_launch_dependents();
    __syncthreads();  // all results are there, and the queries have been read
    if (more && now >= 0) copy_queries(next_item);

    // Partial results: [part][row of all tiles][KV head], from the request's own start on.
    const int64_t row_step = int64_t(num_kv_heads) * (head_dim + kiln::kScaleRoom);
    const int64_t part_step = flat_rows * row_step;
    float* const parts = (mailed ? mail : partials) + head * (head_dim + kiln::kScaleRoom) +
                         (item.row_start + tile * kRows) * row_step;
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
      kiln::Fold folds[kWarps] = {};
      Scale own[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) own[w] = warp_scales[w][row];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {  // units one by one, as a warp does that has them all
        if (divided) folds[w] = kiln::Fold::onto(whole.top, own[w].top);
        else whole.top = fmaxf(whole.top, own[w].top);
      }
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        if (!divided) folds[w] = kiln::Fold::below(whole.top, own[w].top);
        whole.sum = folds[w](whole.sum, own[w].sum);
      }
      float* const place = parts + part * part_step + row * row_step;
#pragma unroll 1
      for (int column = lane * 4; column < head_dim; column += 128) {
        const float* from = results + row * Tile::kPitch + column;
        Float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int w = 0; w < kWarps; ++w)
          y = folds[w](y, kiln::load_vector<Float4>(from + w * (kWarpBytes / 4)));
        if (num_parts == 1)  // as were it merged with nothing: a zero loses its sign
          finish(row, column, kiln::Fold{0.0f, 1.0f}(Float4{0.0f, 0.0f, 0.0f, 0.0f}, y), whole);
        else
          kiln::send(place + column, y);
      }
      if (num_parts > 1) kiln::send_scale(place + head_dim, whole, lane);
    }
    __syncthreads();  // the results have been read
    if (now >= 0 && !more && num_parts > 1) kiln::pdl_launch_dependents();
    if (more && now >= 0) fetch_first(next_item, kAhead, kHalves);

    // Merge the parts, as a tree of 32 children a node: a warp's rows of a node by the last of its
    // children to arrive, in its first child's place; or what was sent, which is one node.
    if (warp < num_rows && num_parts > 1) {
#pragma unroll 1
      for (int level = 0; 1 << level < num_parts; level += kFanBits) {
        const int node = part >> (level + kFanBits) << (level + kFanBits);
        const int children = min(1 << kFanBits, ((num_parts - node - 1) >> level) + 1);
        if (children == 1) continue;  // its state is in place already
        if (mailed) {
          if (part != num_parts - 1) break;
        } else {
          const int64_t arrival = now - part + node + (1 << level);
          __syncwarp();  // the warp's rows are written
          uint32_t before = 0;
          if (lane == 0)
            before = kiln::arrive(arrivals + (arrival * num_kv_heads + head) * kWarps + warp,
                                  children - 1);
          before = __shfl_sync(kWarp, before, 0);
          if (int(before) != children - 1) break;
          __syncwarp();  // the other children's rows are seen
        }
        const bool root = node == 0 && children > (num_parts - 1) >> level;
#pragma unroll 1
        for (int row = warp; row < num_rows; row += kWarps) {
          float* const first = parts + node * part_step + row * row_step;
          const kiln::Children all = {first, part_step << level, children, mailed, divided};
          Scale whole;
#pragma unroll 1
          for (int column = lane * 4; column - lane * 4 < head_dim; column += 128) {
            __syncwarp();  // tells the compiler that all lanes are here: else each shuffle is two
            const Float4 y = kiln::gather<kWarps>(whole, all, head_dim, column);
            if (column >= head_dim) continue;
            if (root) finish(row, column, y, whole);
            else kiln::send(first + column, y);
          }
          if (!root) kiln::send_scale(first + head_dim, whole, lane);
        }
      }
    }
    if (!more) break;

    // Every row sees all keys of [all_begin, all_limit): no key there need be asked. Positions are
    // counted from the warp's first key.
    const int first_row = next_item.tile() * kRows, num_tokens = next_item.num_tokens();
    const int last_row = min(first_row + kRows, num_tokens * group) - 1;
    const int before = num_keys - num_tokens + 1;
    const int all_limit = before + token_of(first_row);
    const int all_begin = window ? before + token_of(last_row) - window : 0;

    if (now < 0) kiln::copy_wait<kHalves>();
    else kiln::copy_wait<kHalves - kAhead>();
    __syncthreads();  // the queries are there
    copy_item(next + gridDim.y, side);

    auto eat = [&](auto eights) {
      constexpr int N = decltype(eights)::kCount;
      typename Tile::template Queries<N> kept;
      kept.keep(queries, lane);
      kiln::AttentionRows<SCALAR_T, HEAD_TILE, N> rows, share;  // a unit, and those before it
      rows.clear();
      share.clear();
      const bool in_units = N == 1 && next_item.kind() == Part::split_in_units;
      auto unit_end = [&](int unit) {
        const int first = first_unit(next_item);
        return unit_begin(next_item, first + unit + 1) - unit_begin(next_item, first);
      };
      int unit = 0, end = in_units ? unit_end(0) : 0;
      int limit[N][2];  // a row sees `window` keys before it
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int row = first_row + n * 8 + lane % 4 * 2 + j;
          limit[n][j] = row <= last_row ? before + token_of(row) : -kKeys;
        }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const unsigned char* keys = stages + 2 * i % kHalves * kHalf;
        const unsigned char* values = stages + (2 * i + 1) % kHalves * kHalf;
        kiln::copy_wait<kHalves - 1>();
        __syncwarp();  // the keys are there
        kiln::Logits<N> logit = {};
        Tile::template multiply_keys<N>(logit, kept, queries, keys, lane);
        __syncwarp();  // the keys have been read
        fetch_next(2 * i + kHalves);
        const int key = i * kKeys;
        auto each = [&](auto change) {
#pragma unroll
          for (int m = 0; m < kPair; ++m)
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
              for (int j = 0; j < 4; ++j) change(logit[m][n][j], m, n, j);
        };
        each([&](float& y, int, int, int) { y *= scale; });
        if (cap > 0) each([&](float& y, int, int, int) { y = kiln::capped(y * steepness, cap); });
        if (key < all_begin || key + kKeys > all_limit)
          each([&](float& y, int m, int n, int j) {
            const int own = key + m * kBlock + j / 2 * 8 + quad, end = limit[n][j % 2];
            if (own >= end || (window && own < end - window)) y = kiln::minus_infinity();
          });
        rows.soften(logit);
        kiln::copy_wait<kHalves - 1>();
        __syncwarp();  // the values are there
#pragma unroll (Tile::kWide ? 1 : kPair)  // bytes take much code to unpack
        for (int m = 0; m < kPair; ++m) {
          uint32_t p[N][2];
          if (m == 0) rows.weights(p, logit[0]);
          else rows.weights(p, logit[1]);
          Tile::template add_values<N>(rows.o, p, values + m * kBlock * Tile::kStep, lane);
        }
        __syncwarp();  // the values have been read
        fetch_next(2 * i + 1 + kHalves);
        if (N == 1 && i + 1 == end) {
          share.fold(rows);
          rows.clear();
          end = unit_end(++unit);
        }
      }
      kiln::copy_commit();
      kiln::copy_wait<0>();
      __syncwarp();  // every lane is done with the stages, and the next item is there
      const int num_rows = last_row - first_row + 1;
      auto hand_over = [&](const auto& result, bool summed) {
        Tile::template spread<N>(results + warp * (kWarpBytes / 4), result.o, num_rows, lane);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const float total = summed ? result.sum[n][j] : rows.over_keys_sum(result.sum[n][j]);
            if (quad == 0) warp_scales[warp][n * 8 + lane % 4 * 2 + j] = {result.top[n][j], total};
          }
      };
      if (in_units) hand_over(share, true);
      else hand_over(rows, false);
    };
    if (last_row - first_row < 8) eat(Eights<1>());
    else eat(Eights<2>());
  }
}
