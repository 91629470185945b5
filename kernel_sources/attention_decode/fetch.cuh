// Loads a warp's share of a work item's keys and values into pipeline stages that belong to the
// warp alone, so the main loop has no block barrier.
#pragma once
#include "attention_decode/rows.cuh"
#include "kiln/ptx/async.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/memory.cuh"

namespace kiln {

// Shared memory layout of a block. A stage has two halves: the keys and the values of a pair of KV
// blocks, filled in turn. A warp's result later overwrites its last kResultHalves halves, while
// keys of the next item fill the first kAhead.
template <class T, class KV_, int D> struct DecodeShape {
  using KV = KV_;
  using Tile = AttentionTile<T, KV, D>;
  static constexpr int kHeadTile = D, kWarpBits = D <= 128 ? 2 : 1, kWarps = 1 << kWarpBits;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kPair = kPairBlocks, kHalf = Tile::kBytes;
  static constexpr int kResultHalves = (kTileRows * Tile::kPitch * 4 + kHalf - 1) / kHalf;
  static constexpr int kHalves = kLargeBytes / (kWarps * kHalf);
  static constexpr int kAhead = kHalves - kResultHalves;
  static constexpr int kWarpBytes = kHalves * kHalf, kKeys = kPair * kKVBlock;
  static_assert(kHalves >= 2 && kAhead >= 1);
};

// The KV pools: blocks of 16 tokens, rows dense, any other strides (in elements).
template <class KV> struct Pools {
  const KV *keys, *values;
  const int* table;
  int64_t key_block, key_head, key_token, value_block, value_head, value_token, table_row;
  int head_dim;
};

struct Thread { int warp, lane, quad; };

// How much a block prefetches before pdl_wait. If many blocks prefetch at once, they delay the last
// loads and stores of the previous kernel. So with `waits` a warp fetches one half at a time, and
// with one_by_one (many parts) one KV block at a time; not with one-byte KV, whose halves are as
// small as KV blocks of other types.
struct Early {
  int halves;
  bool waits, one_by_one;

  // possible: halves without tokens of this step. num_items: of one KV head.
  KILN_FN static Early of(int possible, const WorkItem& item, int num_items) {
    const int places = gridDim.y, to_come = places - blockIdx.y;
    const bool waits = num_items > places / 4;
    // The last blocks start just before the previous kernel ends, and soon need their queries.
    const int most = to_come <= places / 8 ? 1 : to_come <= places / 4 ? 2 : possible;
    const int halves = min(possible, most);
    return {halves, waits, waits && halves > 1 && item.num_parts() > 8};
  }
};

template <class Shape> struct Fetch {
  using KV = typename Shape::KV;
  using Tile = typename Shape::Tile;
  static constexpr uint32_t kWarp = 0xffffffffu;
  static constexpr int kPair = Shape::kPair, kHeadTile = Shape::kHeadTile;
  static constexpr int kChunks = Tile::kChunks, kAtOnce = 32 / kChunks;  // rows
  static constexpr int kIds = 32 / kPair;  // pairs whose ids fit in a warp's lanes
  static_assert(32 % kChunks == 0);  // a lane copies the same 16-byte column of all its rows

  const Pools<KV>& x;
  const Thread& me;
  unsigned char* stages;
  int head, own_column;
  bool dense;
  // The warp's share: `count` pairs of KV blocks, with num_keys keys from its first key to the end
  // of the request. `ids` holds one of the 32 current block ids in each lane, `ahead` the 32 after
  // them.
  int num_keys, count, ahead, ids;
  const int* table;

  KILN_FN Fetch(const Pools<KV>& pools, const Thread& me, unsigned char* stages, int head)
      : x(pools), me(me), stages(stages), head(head), num_keys(0), count(0), ahead(0), ids(0),
        table(pools.table) {
    own_column = me.lane % kChunks * (16 / int(sizeof(KV)));
    dense = x.key_token == kHeadTile && x.value_token == kHeadTile && x.head_dim == kHeadTile;
  }

  KILN_FN int first_unit(const WorkItem& item) const {
    return kiln::first_unit(item.kind(), item.part(), me.warp, Shape::kWarpBits);
  }
  KILN_FN int unit_begin(const WorkItem& item, int unit) const {
    const int num_pairs = (item.end_block - item.first_block + kPair - 1) / kPair;
    return kiln::unit_begin(unit, num_pairs, Shape::kWarpBits);
  }
  KILN_FN int unit_end(const WorkItem& item, int unit) const {  // in pairs from the warp's first
    const int first = first_unit(item);
    return unit_begin(item, first + unit + 1) - unit_begin(item, first);
  }
  KILN_FN int look_up(int pair) const {
    const int block = pair * kPair + me.lane;
    if (block >= count * kPair || block * kKVBlock >= num_keys) return 0;
    return int(load_relaxed(reinterpret_cast<const uint32_t*>(table + block)));
  }

  // Start on an item. Returns how many of its first halves hold no token of this step.
  KILN_FN int begin(const WorkItem& item) {
    const int unit = first_unit(item), first_pair = unit_begin(item, unit);
    count = unit_begin(item, unit + units_of_warp(item.kind(), Shape::kWarpBits)) - first_pair;
    const int first = item.first_block + first_pair * kPair;
    num_keys = item.seq_len - first * kKVBlock;
    table = x.table + item.request * x.table_row + first;
    ids = look_up(0);
    ahead = look_up(kIds);
    return min(Shape::kHalves, max(0, num_keys - item.num_tokens()) / Shape::kKeys * 2);
  }

  // Copy half i: the keys (i even) or values (i odd) of pair i / 2, whose pool blocks are `id`. All
  // in one commit group, or with one_by_one in one for each block, each waiting for the one before.
  KILN_FN void fetch(int i, const int (&id)[kPair], bool one_by_one) const {
    const KV* pool = i % 2 ? x.values + head * x.value_head : x.keys + head * x.key_head;
    const int64_t block = i % 2 ? x.value_block : x.key_block;
    const int64_t token = i % 2 ? x.value_token : x.key_token;
    unsigned char* to = stages + i % Shape::kHalves * Shape::kHalf +
                        me.lane / kChunks * Tile::kStep + me.lane % kChunks * 16;
    const int left = num_keys - i / 2 * Shape::kKeys;
    if (dense && left >= Shape::kKeys) {  // the common case, with the least code
#pragma unroll
      for (int m = 0; m < kPair; ++m) {
        const KV* from = pool + id[m] * block + me.lane / kChunks * kHeadTile + own_column;
#pragma unroll
        for (int row = 0; row < kKVBlock; row += kAtOnce)
          copy_async_16(to + (m * kKVBlock + row) * Tile::kStep, from + row * kHeadTile);
        if (one_by_one && m + 1 < kPair) {
          copy_commit();
          copy_wait<0>();
        }
      }
      return;
    }
    // Rows past num_keys and columns past head_dim are never read; they are filled with zeros.
    const int valid = own_column < x.head_dim ? left - me.lane / kChunks : 0;
#pragma unroll
    for (int m = 0; m < kPair; ++m) {
      const KV* from = pool + id[m] * block + me.lane / kChunks * token + own_column;
#pragma unroll 1
      for (int row = 0; row < kKVBlock; row += kAtOnce, from += kAtOnce * token)
        copy_async_16(to + (m * kKVBlock + row) * Tile::kStep, from, m * kKVBlock + row < valid);
    }
  }
  // Fetch half i, if the share has it. Always commits one group.
  KILN_FN void next(int i) {
    const int pair = i / 2;
    if (i % 2 == 0 && pair % kIds == 0) {
      ids = ahead;
      ahead = look_up(pair + kIds);
    }
    int id[kPair];
#pragma unroll
    for (int m = 0; m < kPair; ++m) id[m] = __shfl_sync(kWarp, ids, pair % kIds * kPair + m);
    if (pair < count) fetch(i, id, false);
    copy_commit();
  }
  // Fetch half i of the first halves of an item, which itself holds the ids of the first pair.
  KILN_FN void first(const WorkItem& item, int i, bool one_by_one = false) const {
    int id[kPair];
#pragma unroll
    for (int m = 0; m < kPair; ++m)
      id[m] = i < 2 ? item.ids[me.warp * kPair + m] : __shfl_sync(kWarp, ids, i / 2 * kPair + m);
    if (i / 2 < count) fetch(i, id, one_by_one);
    copy_commit();
  }
};

}  // namespace kiln
