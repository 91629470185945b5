// Attention of one warp: the rows of a tile over the warp's share of a work item's keys.
#pragma once
#include "attention_decode/parts.cuh"
#include "kiln/rows/vec.cuh"

namespace kiln {

// The step's queries: [num_tokens, num_heads, head_dim], rows dense.
template <class T> struct Queries {
  const T* first;
  int64_t token_step, head_step;
};

// Queries of one item, addressed as chunks of 16 bytes.
template <class Shape, class T> struct QueryRows {
  static constexpr int kRow = Shape::kHeadTile / 8;  // chunks
  const Queries<T>& from;
  const HeadRows& heads;
  int start, rows, first_token, head_dim;

  KILN_FN QueryRows(const WorkItem& item, const Queries<T>& from, const HeadRows& heads,
                    int head_dim)
      : from(from), heads(heads), start(item.tile() * kTileRows),
        rows(item.num_tokens() * heads.group - start), first_token(item.first_token),
        head_dim(head_dim) {}

  KILN_FN const T* chunk(int i) const {
    const int row = start + i / kRow, token = heads.token_of(row);
    const int64_t h = heads.head * heads.group + row - token * heads.group;
    return from.first + (first_token + token) * from.token_step + h * from.head_step +
           i % kRow * 8;
  }
  // Copy the rows and zero the padding rows, in one commit group. own: address of this thread's
  // first chunk.
  KILN_FN void copy(unsigned char* to, const T* own) const {
    const int padded = (rows > 8 ? kTileRows : 8) * kRow;  // rows that the mma reads
#pragma unroll 1
    for (int i = threadIdx.x; i < padded; i += Shape::kThreads) {
      const int row = i / kRow, chunk = i % kRow;
      if (i >= Shape::kThreads) own = this->chunk(i);
      copy_async_16(to + row * Shape::Tile::kQueryStep + chunk * 16, own,
                    row < rows && chunk * 8 < head_dim);
    }
    copy_commit();
  }
  // For one-byte KV: convert each row to fp16, scaled by a power of two so that its largest element
  // has exponent 14. scales gets the inverses. Each thread converts the chunks that it copied
  // itself, so no barrier is needed before.
  KILN_FN void scale_to_fp16(unsigned char* queries, float (&scales)[kTileRows]) const {
    const int padded = (rows > 8 ? kTileRows : 8) * kRow;
#pragma unroll 1
    for (int i = threadIdx.x; i < padded; i += Shape::kThreads) {
      unsigned char* at = queries + i / kRow * Shape::Tile::kQueryStep + i % kRow * 16;
      Vec<T> x = load_vector<Vec<T>>(at);
      Vec<fp16> y;
      float greatest = 0;
#pragma unroll
      for (int j = 0; j < 8; ++j) greatest = fmaxf(greatest, fabsf(to_float(x.v[j])));
#pragma unroll
      for (int m = 1; m < kRow; m *= 2)
        greatest = fmaxf(greatest, __shfl_xor_sync(0xffffffffu, greatest, m));
      const uint32_t exponent = max(as_uint(greatest) >> 23, 32u);  // both powers are normal
      const float up = as_float((2 * 127 + 14 - exponent) << 23);
#pragma unroll
      for (int j = 0; j < 8; ++j) from_float(to_float(x.v[j]) * up, y.v[j]);
      store_vector(at, y);
      if (i % kRow == 0) scales[i / kRow] = as_float((exponent - 14) << 23);
    }
  }
};

// Logits are in log2 units: scale and cap c (0: none) are multiplied by log2(e); steepness = 2 / c.
struct Softmax { float scale, cap, steepness; };

// Causal masks of a tile's rows, and those of a window (first_visible). Keys count from the warp's
// first, which is key `origin` of the request. Keys in [all_begin, all_limit) are visible to every
// row: no mask.
struct MaskBounds {
  int first_row, last_row, before, all_begin, all_limit, window, origin;

  KILN_FN static MaskBounds of(const WorkItem& item, const HeadRows& heads, int num_keys,
                               int window) {
    MaskBounds s;
    s.first_row = item.tile() * kTileRows;
    const int num_tokens = item.num_tokens();
    s.last_row = min(s.first_row + kTileRows, num_tokens * heads.group) - 1;
    s.before = num_keys - num_tokens + 1;
    s.all_limit = s.before + heads.token_of(s.first_row);
    s.window = window, s.origin = item.seq_len - num_keys;
    s.all_begin = s.begin(s.before + heads.token_of(s.last_row));
    return s;
  }
  // First key that the row whose keys end at `end` sees; 0 if it sees all.
  KILN_FN int begin(int end) const {
    return window ? first_visible(end + origin, window) - origin : 0;
  }
};

// Scale and cap the logits, and set masked ones to -infinity.
template <int N>
KILN_FN void scale_and_mask(Logits<N>& logit, const Softmax& softmax, const MaskBounds& bounds,
                            const float (&scale)[N][2], const int (&limit)[N][2], int key,
                            int quad) {
  constexpr int kKeys = kPairBlocks * kKVBlock;
  auto each = [&](auto change) {
#pragma unroll
    for (int m = 0; m < kPairBlocks; ++m)
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) change(logit[m][n][j], m, n, j);
  };
  each([&](float& y, int, int n, int j) { y *= scale[n][j % 2]; });
  if (softmax.cap > 0)
    each([&](float& y, int, int, int) { y = capped(y * softmax.steepness, softmax.cap); });
  if (key < bounds.all_begin || key + kKeys > bounds.all_limit) {
    int begin[N][2];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) begin[n][j] = bounds.begin(limit[n][j]);
    each([&](float& y, int m, int n, int j) {
      const int own = key + m * kKVBlock + j / 2 * 8 + quad;
      if (own >= limit[n][j % 2] || own < begin[n][j % 2]) y = minus_infinity();
    });
  }
}

// Shared memory of a block: the item's queries, its ItemPlace, then the results of the warps.
template <class Shape> struct SharedBuffers {
  unsigned char* queries;
  float (&query_scales)[kTileRows];  // one-byte KV: inverse scales of the queries
  const ItemPlace& place;
  float* results;
  Scale (&scales)[Shape::kWarps][kTileRows];
};

// N: groups of 8 rows. A warp has one, two or four units of keys. It accumulates each unit
// separately and merges them as a binary tree. ready() waits for the queries; it runs after all
// independent work. Returns a copy of buffers.place.
template <int N, class T, class Shape, class Ready>
KILN_FN ItemPlace attend(Fetch<Shape>& from, const WorkItem& item, const HeadRows& heads,
                         const Softmax& softmax, const MaskBounds& bounds,
                         const SharedBuffers<Shape>& buffers, Ready ready) {
  using Tile = typename Shape::Tile;
  using Rows = AttentionRows<typename Tile::Factor, Shape::kHeadTile, N>;
  constexpr int kHalves = Shape::kHalves, kHalf = Shape::kHalf;
  const int warp = from.me.warp, lane = from.me.lane, quad = from.me.quad;
  Rows rows, two, share;  // this unit, this pair of units, the pairs before it
  rows.clear();
  two.clear();
  share.clear();
  const int units = item.kind() == Part::split ? 1 : units_of_warp(item.kind(), Shape::kWarpBits);
  const bool in_units = N == 1 && units > 1;
  int unit = 0, end = in_units ? from.unit_end(item, 0) : 0;
  int limit[N][2];
  float scale[N][2];
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = bounds.first_row + n * 8 + lane % 4 * 2 + j;
      limit[n][j] = row <= bounds.last_row ? bounds.before + heads.token_of(row) : -Shape::kKeys;
    }
  ready();
  typename Tile::template Queries<N> kept;
  kept.keep(buffers.queries, lane);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = n * 8 + lane % 4 * 2 + j;
      scale[n][j] = Tile::kWide ? softmax.scale * buffers.query_scales[row] : softmax.scale;
    }
#pragma unroll 1
  for (int i = 0; i < from.count; ++i) {
    const unsigned char* keys = from.stages + 2 * i % kHalves * kHalf;
    const unsigned char* values = from.stages + (2 * i + 1) % kHalves * kHalf;
    copy_wait<kHalves - 1>();
    __syncwarp();  // the keys are loaded
    Logits<N> logit = {};
    Tile::template multiply_keys<N>(logit, kept, buffers.queries, keys, lane);
    __syncwarp();  // the keys have been read
    from.next(2 * i + kHalves);
    scale_and_mask<N>(logit, softmax, bounds, scale, limit, i * Shape::kKeys, quad);
    rows.online_softmax_update(logit);
    copy_wait<kHalves - 1>();
    __syncwarp();  // the values are loaded
// Heads above 128 use all registers: no unrolling.
#pragma unroll (Tile::kLong || Shape::kWarps < 4 ? 1 : kPairBlocks)
    for (int m = 0; m < kPairBlocks; ++m) {
      uint32_t p[N][2];
      if (m == 0) rows.weights(p, logit[0]);
      else rows.weights(p, logit[1]);
      Tile::template add_values<N>(rows.o, p, values + m * kKVBlock * Tile::kStep, lane);
    }
    __syncwarp();  // the values have been read
    from.next(2 * i + 1 + kHalves);
    if (N == 1 && i + 1 == end) {
      rows.end();
      two.merge(rows);
      rows.clear();
      if (Shape::kWarps == 4 && unit % 2 == 1) {
        share.merge(two);
        two.clear();
      }
      end = from.unit_end(item, ++unit);
    }
  }
  copy_commit();
  copy_wait<0>();
  __syncwarp();  // every lane has read the stages, and the next item is loaded
  const int num_rows = bounds.last_row - bounds.first_row + 1;
  if (in_units) rows = Shape::kWarps == 4 ? share : two;
  else rows.end();
  const ItemPlace place = buffers.place;  // loaded now: after the stores it would wait for them
  Tile::template store_rows<N>(buffers.results + warp * (Shape::kWarpBytes / 4), rows.o, num_rows,
                               lane);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (quad == 0)
        buffers.scales[warp][n * 8 + lane % 4 * 2 + j] = {rows.top[n][j], rows.sum[n][j]};
  return place;
}

}  // namespace kiln
