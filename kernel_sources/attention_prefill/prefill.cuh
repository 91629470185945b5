// Prefill attention except its matrix products: work items, masks, copies, and the end of a row. A
// block takes kPrefillRows rows (token, head of the group) of one request and KV head at a time,
// each warp 16 * Core::kParts of them. A Core supplies the products; prefill() lists its members.
#pragma once
#include "attention_prefill/softmax.cuh"
#include "attention_prefill/tiles.cuh"
#include "kiln/ptx/async.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/memory.cuh"
#include "kiln/ptx/mma.cuh"
#include "kiln/math/reduce.cuh"

namespace kiln {

constexpr int kAheadBlocks = 32;  // KV blocks whose addresses a warp holds

// The kernel's parameters.
template <class T, class KV> struct Prefill {
  T* out;
  float* lse;
  const T* query;
  const KV *key_pool, *value_pool;
  const int *block_table, *seq_lens, *cu_seqlens_q;
  const TileItem* items;
  uint32_t* counter;
  const float* sinks;
  int64_t query_token, query_head, key_block, key_head, key_token, value_block, value_head,
      value_token, table_row;
  int num_heads, num_kv_heads, head_dim, window;
  float scale, soft_cap, v_scale;
};

// Keys in [begin, end) are visible to some row of a warp, those in [all_begin, all_end) to all.
struct alignas(16) VisibleKeys { int begin, all_begin, all_end, end; };

// A warp's state of its item, in shared memory because registers are short.
template <class KV, int ROWS> struct WarpState {
  const KV *keys[kAheadBlocks], *values[kAheadBlocks];  // addresses of blocks, at the KV head
  const KV *key_pool, *value_pool;                      // address of block 0, at the KV head
  const int* table;                                     // block ids of the item
  int num_blocks;                                       // KV blocks of the item
  int num_keys[32];  // keys of the item; 0: a lane past head_dim, which copies zeros
  int work;          // item * num_kv_heads + KV head
  VisibleKeys visible;
  int begins[ROWS], limits[ROWS];  // a row sees the keys from its begin on, before its limit
  float norms[ROWS];
};

struct alignas(16) Words4 { uint32_t v[4]; };

// Online softmax state of a warp's rows; a lane holds parts of two rows in each 16.
template <int PARTS, int D> struct PrefillRows {
  float o[PARTS][D / 8][4] = {};
  float top[PARTS][2], sum[PARTS][2] = {};
};

// Normalise a warp's rows and store them, through the shared memory of its queries (rows from
// `base` on). norms: scratch of the warp.
template <class Core, class T, class KV>
KILN_FN void finish(const Prefill<T, KV>& x, const WarpRows& rows, unsigned char* queries, int base,
                    float (&norms)[16 * Core::kParts],
                    const PrefillRows<Core::kParts, Core::kHeadTile>& all_rows) {
  constexpr uint32_t kWarp = 0xffffffffu;
  constexpr int kParts = Core::kParts, kChunks = Core::kHeadTile / 8;
  const auto& [o, top, sum] = all_rows;
  const int lane = threadIdx.x % 32, quad = lane / 4;
  float all = 0, best = 0;  // of row `lane`
#pragma unroll
  for (int m = 0; m < kParts; ++m)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float total = quad_sum(sum[m][j]);
      const float s = __shfl_sync(kWarp, total, lane % 8 * 4);
      const float t = __shfl_sync(kWarp, top[m][j], lane % 8 * 4);
      if (lane / 8 == 2 * m + j) all = s, best = t;
    }
  if (lane < 16 * kParts) {
    float f = x.v_scale;
    if (x.sinks && lane < rows.count) {  // a logit without a value
      const float sink = x.sinks[rows.head_of(lane)] * kLog2e, high = fmaxf(best, sink);
      const float less = exp2_fast(best - high);
      all = all * less + exp2_fast(sink - high);
      best = high;
      f *= less;
    }
    norms[lane] = all > 0 ? div_rn(f, all) : 0.0f;  // no visible key: 0, and lse -infinity
    if (x.lse && lane < rows.count)
      x.lse[rows.token_of(lane) * x.num_heads + rows.head_of(lane)] =
          all > 0 ? (best + log2_fast(all)) * kLn2 : best;
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kParts; ++m)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = m * 16 + quad + 8 * j;
      const float f = norms[row];
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint32_t pair = pack<T>(o[m][c][2 * j] * f, o[m][c][2 * j + 1] * f);
        store_vector(queries + Core::query_place(base + row, c) + lane % 4 * 4, pair);
      }
    }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < rows.count * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * 8 >= x.head_dim) continue;
    const int64_t to = rows.token_of(row) * x.num_heads + rows.head_of(row);
    store_vector(x.out + to * x.head_dim + chunk * 8,
                 load_vector<Words4>(queries + Core::query_place(base + row, chunk)));
  }
}

// Copy a tile from the pool. token: elements between rows of a block. Rows from `valid` on are not
// read; they become zeros.
template <class Core, class KV>
KILN_FN void copy_tile(unsigned char* to, const KV* const* pool, int64_t token, int valid) {
  constexpr int kThreads = Core::kThreads, kBlock = kKVBlock, kBlocks = Core::kKeys / kBlock;
  constexpr int kChunks = Core::kHeadTile * int(sizeof(KV)) / 16, kChunk = 16 / int(sizeof(KV));
  static_assert(kThreads % kChunks == 0 && 32 % kChunks == 0);
  // A thread copies the same 16-byte column each time, and its rows divide a block evenly.
  if constexpr (kBlock % (kThreads / kChunks) == 0) {
    constexpr int kAtOnce = kThreads / kChunks;
    const int low = threadIdx.x / kChunks, column = threadIdx.x % kChunks;
    const int64_t own = low * token + column * kChunk, step = kAtOnce * token;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const KV* from = pool[b] + own;
#pragma unroll
      for (int row = b * kBlock; row < (b + 1) * kBlock; row += kAtOnce, from += step)
        copy_async_16(to + Core::key_place(row + low, column), from, row + low < valid);
    }
  } else {
    constexpr int kTurns = (Core::kKeys * kChunks + kThreads - 1) / kThreads;
#pragma unroll 2
    for (int turn = 0; turn < kTurns; ++turn) {
      const int c = threadIdx.x + turn * kThreads;
      const int row = c / kChunks, column = c % kChunks;
      if (Core::kKeys * kChunks % kThreads && row >= Core::kKeys) continue;
      copy_async_16(to + Core::key_place(row, column),
                    pool[row / kBlock] + row % kBlock * token + column * kChunk, row < valid);
    }
  }
}

// Copy a warp's rows of the queries; missing rows and columns become zeros.
template <class Core, class T, class KV>
KILN_FN void copy_queries(const Prefill<T, KV>& x, const WarpRows& rows, unsigned char* queries,
                          int base) {
  constexpr int kRows = 16 * Core::kParts, kChunks = Core::kHeadTile / 8;
#pragma unroll 1
  for (int i = threadIdx.x % 32; i < kRows * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    const T* from = x.query + rows.token_of(row) * x.query_token +
                    rows.head_of(row) * x.query_head + chunk * 8;
    copy_async_16(queries + Core::query_place(base + row, chunk), from,
                  row < rows.count && chunk * 8 < x.head_dim);
  }
}

// The kernel. Core has kParts, kThreads, kHeadTile and kKeys (keys of a tile); queries(), their
// shared memory; query_place(row, chunk) and key_place(row, chunk), byte offsets of a 16-byte chunk
// in the queries and in a tile; and attend(), which accumulates an item's `count` tiles.
template <class Core, class T, class KV> KILN_FN void prefill(const Prefill<T, KV>& x) {
  constexpr int kParts = Core::kParts, kWarps = Core::kThreads / 32;
  constexpr int kBlock = kKVBlock, kBlocks = Core::kKeys / kBlock;
  constexpr int kRawChunks = Core::kHeadTile * int(sizeof(KV)) / 16;

  __shared__ int next_work[2];
  __shared__ WarpState<KV, 16 * kParts> of_warp[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, base = warp * 16 * kParts;
  const int group = x.num_heads / x.num_kv_heads;
  auto& state = of_warp[warp];
  unsigned char* queries = Core::queries();

  // A block starts with work item blockIdx.x. For each item it takes one more number from the
  // counter, so blocks take exactly num_work() numbers, and the counter wraps to 0.
  auto num_work = [&] { return x.items[0].request * x.num_kv_heads; };  // saves registers
  auto take = [&] { return int(gridDim.x + arrive(x.counter, num_work() - 1)); };
  auto rows_of = [&](int work) {  // likewise
    const TileItem item = load_vector<TileItem>(x.items + 1 + work / x.num_kv_heads);
    const int token = x.cu_seqlens_q[item.request];
    const int all = x.cu_seqlens_q[item.request + 1] - token;
    const int first = item.tile * kPrefillRows + base;
    const int count = min(16 * kParts, all * group - first);
    return WarpRows{first, count, group, token, work % x.num_kv_heads * group};
  };
  for (int turn = 0, work = blockIdx.x; work < num_work(); work = next_work[turn]) {
    turn ^= 1;
    const int kv_head = work % x.num_kv_heads;
    const TileItem item = load_vector<TileItem>(x.items + 1 + work / x.num_kv_heads);
    const int* table = x.block_table + item.request * x.table_row + item.begin;
    const int num_blocks = item.end - item.begin, count = (num_blocks + kBlocks - 1) / kBlocks;
    int ahead = lane < num_blocks ? table[lane] : 0;  // see next_blocks
    auto request = PrefillRequest::load(item.request, x.seq_lens, x.cu_seqlens_q, group);
    const int origin = item.begin * kBlock;
    request.seq_len -= origin;  // keys now count from the item's first block
    const WarpRows rows = rows_of(work);
    // Begins and limits never fall from row to row. A padding row has limit 0, so that its warp masks
    // every tile.
    if (lane < 16 * kParts) {
      const int limit = lane < rows.count ? request.limit((rows.first + lane) / group) : 0;
      const int begin = first_visible(limit + origin, x.window) - origin;
      state.begins[lane] = begin, state.limits[lane] = limit;
      VisibleKeys& seen = state.visible;
      if (lane == 0) seen.begin = begin, seen.all_end = rows.count < 16 * kParts ? 0 : limit;
      if (lane == max(rows.count, 1) - 1) seen.all_begin = begin, seen.end = limit;
    }
    const bool inside = lane % kRawChunks * (16 / int(sizeof(KV))) < x.head_dim;
    state.num_keys[lane] = inside ? min(request.seq_len, num_blocks * kBlock) : 0;
    if (lane == 0) {
      state.key_pool = x.key_pool + kv_head * x.key_head;
      state.value_pool = x.value_pool + kv_head * x.value_head;
      state.table = table;
      state.num_blocks = num_blocks;
      state.work = work;
    }

    // Each lane looks up one of the next 32 blocks; `ahead` prefetches the 32 after them.
    auto next_blocks = [&](int i) {  // call before copying the keys of tile i
      if (i * kBlocks % kAheadBlocks == 0) {
        const int64_t id = ahead;
        __syncwarp();  // nobody reads the previous addresses, and `state` is set
        state.keys[lane] = state.key_pool + id * x.key_block;
        state.values[lane] = state.value_pool + id * x.value_block;
        const int next = i * kBlocks + kAheadBlocks + lane;
        ahead = next < state.num_blocks ? state.table[next] : 0;
        __syncwarp();
      }
    };
    auto fetch = [&](int i, unsigned char* to, const KV* const* pool, int64_t token) {
      const int valid = state.num_keys[lane] - i * Core::kKeys;
      copy_tile<Core>(to, pool + i * kBlocks % kAheadBlocks, token, valid);
    };
    auto fetch_keys = [&](int i, unsigned char* to) {
      next_blocks(i);
      fetch(i, to, state.keys, x.key_token);
    };
    auto fetch_values = [&](int i, unsigned char* to) {  // of the tile whose keys were fetched last
      fetch(i, to, state.values, x.value_token);
    };

    copy_queries<Core>(x, rows, queries, base);
    PrefillRows<kParts, Core::kHeadTile> sums;
#pragma unroll
    for (int m = 0; m < kParts; ++m) sums.top[m][0] = sums.top[m][1] = minus_infinity();
    Core::attend(sums, x, state, count, fetch_keys, fetch_values, [&] {
      if (threadIdx.x == 0) next_work[turn] = take();
    });

    copy_wait<0>();  // no tiles: the queries are still being copied to where results go
    __syncwarp();
    finish<Core>(x, rows_of(state.work), queries, base, state.norms, sums);
    __syncthreads();  // every warp is done with the tiles, and next_work is set
  }
}

// Mask the keys of the tile from `key` on that the warp's rows do not see.
template <int PARTS, int N, class STATE>
KILN_FN void apply_mask(float (&s)[PARTS][N][4], const STATE& state, const VisibleKeys& visible,
                        int key) {
  if (key >= visible.all_begin && key + N * 8 <= visible.all_end) return;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < PARTS; ++m)
#pragma unroll
    for (int j = 0; j < 2; ++j) {  // this lane holds parts of rows lane / 4 and lane / 4 + 8
      const int row = m * 16 + lane / 4 + 8 * j, first = key + lane % 4 * 2;
      mask_keys(s[m], j, state.begins[row] - first, state.limits[row] - first);
    }
}

}  // namespace kiln
