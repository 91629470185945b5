// How a warp of decode attention comes by the keys and values of its part of a work item: through
// stages of its own in shared memory, so that the loop over them has no block barrier.
#pragma once
#include "attention_decode/rows.cuh"
#include "kiln/ptx/async.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/memory.cuh"

namespace kiln {

// What a block has. A stage has two halves, keys and values of a pair of blocks of the pool, that
// are filled in turn. A warp's result takes the place of its last halves, while keys of the next
// item fill the first.
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

// The pools, as the launch says: blocks of 16 tokens, rows dense, any other strides.
template <class KV> struct Pools {
  const KV *keys, *values;
  const int* table;
  int64_t key_block, key_head, key_token, value_block, value_head, value_token, table_row;
  int head_dim;
};

struct Thread { int warp, lane, quad; };

// What a block fetches before the kernel ahead has ended: this many halves, and in which steps.
// Where many blocks fetch at a time, what the last of the kernel ahead send and receive would wait
// behind it: so half after half, or where messages are many, block after block of the pool (of
// bytes not: a half is as small as a block of others).
struct Early {
  int halves;
  bool waits, one_by_one;

  // possible: halves that hold nothing of the step's own tokens. num_items: of one KV head.
  KILN_FN static Early of(int possible, const WorkItem& item, int num_items) {
    const int places = gridDim.y, to_come = places - blockIdx.y;
    const bool waits = num_items > places / 4;
    // The last blocks come when the kernel ahead is about to end: they soon ask for their queries.
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
  static constexpr int kIds = 32 / kPair;  // pairs whose ids a warp has
  static_assert(32 % kChunks == 0);  // a lane has the same 16 bytes of all rows that it copies

  const Pools<KV>& x;
  const Thread& me;
  unsigned char* stages;
  int head, own_column;
  bool dense;
  // `count` pairs of blocks of an item, with num_keys of the request from the first on. A lane has
  // looked up one of 32 ids, the next come in `ahead`.
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
  KILN_FN int unit_end(const WorkItem& item, int unit) const {  // of the warp's, in its own pairs
    const int first = first_unit(item);
    return unit_begin(item, first + unit + 1) - unit_begin(item, first);
  }
  KILN_FN int look_up(int pair) const {
    const int block = pair * kPair + me.lane;
    if (block >= count * kPair || block * kKVBlock >= num_keys) return 0;
    return int(load_relaxed(reinterpret_cast<const uint32_t*>(table + block)));
  }

  // Return how many of the item's first halves hold nothing of the step's own tokens.
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

  // Half i: the keys (i even) or values of pair i / 2, whose blocks have ids in the pool; a group,
  // or one a block, each after the one before it has come.
  KILN_FN void fetch(int i, const int (&id)[kPair], bool one_by_one) const {
    const KV* pool = i % 2 ? x.values + head * x.value_head : x.keys + head * x.key_head;
    const int64_t block = i % 2 ? x.value_block : x.key_block;
    const int64_t token = i % 2 ? x.value_token : x.key_token;
    unsigned char* to = stages + i % Shape::kHalves * Shape::kHalf +
                        me.lane / kChunks * Tile::kStep + me.lane % kChunks * 16;
    const int left = num_keys - i / 2 * Shape::kKeys;
    if (dense && left >= Shape::kKeys) {  // most often, and in the least code
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
    // Rows past it are never read, nor columns past head_dim: there zeros come in their place.
    const int valid = own_column < x.head_dim ? left - me.lane / kChunks : 0;
#pragma unroll
    for (int m = 0; m < kPair; ++m) {
      const KV* from = pool + id[m] * block + me.lane / kChunks * token + own_column;
#pragma unroll 1
      for (int row = 0; row < kKVBlock; row += kAtOnce, from += kAtOnce * token)
        copy_async_16(to + (m * kKVBlock + row) * Tile::kStep, from, m * kKVBlock + row < valid);
    }
  }
  // Half i, if there is such a pair, whose ids a lane has in `ids`.
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
  // The same of an item's first halves; the ids of its first pair came with it.
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
