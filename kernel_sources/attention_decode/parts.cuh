// The end of a work item of decode attention: its warps' results become a row of out, or a partial
// result, which is added up by those who are sent a request's parts, or by who comes last of those
// that hold them. Two halves or quarters of a split that one cluster has become one part before.
#pragma once
#include "attention_decode/fetch.cuh"
#include "attention_decode/merge.cuh"
#include "kiln/ptx/cluster.cuh"

namespace kiln {

// Row i of all tiles of a request is head i % group of token i / group.
struct HeadRows {
  int head, num_kv_heads, num_heads, group, inverse_group;
  KILN_FN int token_of(int row) const {
    return int(unsigned(row) * unsigned(inverse_group) >> 20);
  }
};

// Where results go, and partial ones: [part][row of all tiles][KV head], from a request's own start.
template <class T> struct Results {
  T* out;
  float* lse;
  const float* sinks;
  float *partials, *mail;
  int mail_rows;  // of parts; behind them as many for sums of parts
  uint32_t* arrivals;
  int head_dim;
  float v_scale;
};

// Whether an item's result is sent, where it is one of many. one_each: no block has two items.
KILN_FN bool is_mailed(const WorkItem& item, bool one_each) {
  return one_each && item.num_parts() <= kFanIn << node_bits_of(item.kind());
}
// Whether the cluster's two items, halves or quarters of a split, become one part before that. It
// is worth it where who adds up the parts has many, and its code where a block has four warps.
template <class Shape> constexpr bool kPairs = kClusters && Shape::kWarps == 4;
template <class Shape> KILN_FN bool is_paired(const WorkItem& item, bool one_each) {
  return kPairs<Shape> && is_mailed(item, one_each) && halvings_of(item.kind()) > 0 &&
         item.num_parts() > 8 && (int(blockIdx.y) - item.part()) % 2 == 0;
}

// Paired blocks send each other every second row: to shared memory, where the queries beside those
// that are multiplied would be. There a row lies with its scale, kUnsent until it has come.
template <class Shape> struct Inbox {
  static constexpr int kRow = Shape::kHeadTile + 4;  // floats
  static constexpr int kRows = kTileRows / 4;        // half of a tile of eight
  static_assert(kRows * kRow * 4 <= kTileRows / 2 * Shape::Tile::kQueryStep);

  KILN_FN static float* of(unsigned char* queries) {
    return reinterpret_cast<float*>(queries + kTileRows / 2 * Shape::Tile::kQueryStep);
  }
  KILN_FN static void clear(unsigned char* queries) {
    const float unsent = as_float(kUnsent);
#pragma unroll 1
    for (int i = threadIdx.x; i < kRows * kRow / 4; i += Shape::kThreads)
      store_vector(of(queries) + i * 4, Float4{unsent, unsent, unsent, unsent});
  }
};

// What the end of an item starts from. It takes long to find out, so one thread does while the
// item's queries are on their way.
struct ItemPlace {
  float* parts;  // of the tile's rows
  float* place;  // of the item's result of the first row
  int64_t row_step, part_step;
  int64_t sum_step;  // from what a part sends to the sum of a node's, in its first child's place
  int num_parts, tile, part, num_rows, node_bits, halvings;
  bool mailed;
  bool paired;  // the cluster's two items are one part, of which each block has every second row

  // one_each: no block has two items.
  template <class Shape, class T>
  KILN_FN static ItemPlace of(const Results<T>& x, const HeadRows& heads, const WorkItem& item,
                              bool one_each) {
    ItemPlace y;
    y.num_parts = item.num_parts(), y.tile = item.tile(), y.part = item.part();
    y.node_bits = node_bits_of(item.kind()), y.halvings = halvings_of(item.kind());
    y.mailed = is_mailed(item, one_each);
    const int flat_rows = item.num_tokens() * heads.group;  // of all tiles
    y.num_rows = min(kTileRows, flat_rows - y.tile * kTileRows);
    y.row_step = int64_t(heads.num_kv_heads) * (x.head_dim + kScaleRoom);
    y.part_step = flat_rows * y.row_step;
    y.parts = (y.mailed ? x.mail : x.partials) + heads.head * (x.head_dim + kScaleRoom) +
              (item.row_start + y.tile * kTileRows) * y.row_step;
    y.sum_step = y.mailed ? x.mail_rows * y.row_step : 0;
    y.paired = is_paired<Shape>(item, one_each);
    if (y.paired) y.num_parts /= 2, y.part /= 2, --y.node_bits, --y.halvings;
    // Whether it is the last part and has its node for itself: then it is that node's sum.
    const bool first_of_node = (y.part & ((1 << y.node_bits) - 1)) == 0;
    const bool alone = y.part > 0 && first_of_node && y.part + 1 == y.num_parts;
    y.place = y.parts + y.part * y.part_step + (alone ? y.sum_step : 0);
    return y;
  }
};

template <class T, class Shape> struct ItemEnd : ItemPlace {
  static constexpr uint32_t kWarp = 0xffffffffu;
  static constexpr int kWarps = Shape::kWarps;
  const Results<T>& x;
  const HeadRows& heads;
  const WorkItem& item;
  const Thread& me;

  KILN_FN ItemEnd(const Results<T>& results, const HeadRows& heads, const WorkItem& item,
                  const Thread& me, const ItemPlace& own)
      : ItemPlace(own), x(results), heads(heads), item(item), me(me) {}

  // Where four columns of a row of out go, its lse, and its sink: what can be found out beforehand.
  struct RowEnd {
    T* out;
    float* lse;
    const float* sink;
  };
  KILN_FN RowEnd row_end(int row, int column) const {
    const int flat = tile * kTileRows + row, token = heads.token_of(flat);
    const int h = heads.head * heads.group + flat - token * heads.group;
    const int64_t to = int64_t(item.first_token + token) * heads.num_heads + h;
    return {x.out + to * x.head_dim + column, x.lse && column == 0 ? x.lse + to : nullptr,
            x.sinks ? x.sinks + h : nullptr};
  }
  KILN_FN void finish(const RowEnd& to, Float4 y, Scale whole) const {
    store_row(to.out, y, end_row(to.lse, to.sink, whole, x.v_scale));
  }

  // Of a row four columns a pass, and its scale.
  struct RowSum {
    static constexpr int kPasses = (Shape::kHeadTile + 127) / 128;
    Scale scale;
    Float4 y[kPasses];

    KILN_FN void add(const RowSum& next) {
      const Fold f = Fold::onto(scale.top, next.scale.top);
      scale.sum = f(scale.sum, next.scale.sum);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) y[pass] = f(y[pass], next.y[pass]);
    }
  };
  // Of a block's warps, as a binary tree.
  KILN_FN RowSum sum_of_warps(int row, const float* results, const Scale* scales) const {
    RowSum own[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {  // all at once: nothing waits for the scales first
      own[w].scale = scales[w * kTileRows + row];
#pragma unroll
      for (int pass = 0; pass < RowSum::kPasses; ++pass)
        own[w].y[pass] = load_vector<Float4>(results + w * (Shape::kWarpBytes / 4) +
                                             row * Shape::Tile::kPitch + pass * 128 +
                                             me.lane * 4 % Shape::kHeadTile);
    }
#pragma unroll
    for (int step = 1; step < kWarps; step *= 2)
#pragma unroll
      for (int w = 0; w < kWarps; w += 2 * step) own[w].add(own[w + step]);
    return own[0];
  }
  KILN_FN void send_row(float* to, const RowSum& sum) const {
    send_scale(to + x.head_dim, sum.scale, me.lane);
#pragma unroll
    for (int pass = 0; pass < RowSum::kPasses; ++pass) {
      const int column = pass * 128 + me.lane * 4;
      if (column < x.head_dim) send(to + column, sum.y[pass]);
    }
  }
  KILN_FN void finish_row(int row, const RowSum& sum) const {
#pragma unroll
    for (int pass = 0; pass < RowSum::kPasses; ++pass) {
      const int column = pass * 128 + me.lane * 4;
      if (column >= x.head_dim) continue;
      // As were it merged with nothing: a zero loses its sign.
      finish(row_end(row, column),
             Fold{0.0f, 1.0f}(Float4{0.0f, 0.0f, 0.0f, 0.0f}, sum.y[pass]), sum.scale);
    }
  }

  // Merge the warps' results of all rows.
  KILN_FN void merge_warps(const float* results, const Scale* scales) const {
    float* to = place + me.warp * row_step;
#pragma unroll 1
    for (int row = me.warp; row < num_rows; row += kWarps, to += kWarps * row_step) {
      const RowSum sum = sum_of_warps(row, results, scales);
      if (num_parts > 1) send_row(to, sum);
      else finish_row(row, sum);
    }
  }
  // The same where blocks are paired: send the other block its rows, and merge what it sends.
  KILN_FN void merge_blocks(const float* results, const Scale* scales, float* inbox) const {
    const int own = int(blockIdx.y % 2);
    float* const others = map_shared(inbox, 1 - own);
#pragma unroll 1
    for (int n = 2 * me.warp; n / 2 * 2 < num_rows; n += n % 2 ? 2 * kWarps - 1 : 1) {
      const bool other = n % 2 == 0;  // first a row of the other block's, then this one's beside it
      const int row = n / 2 * 2 + (other ? 1 - own : own), at = n / 2 * Inbox<Shape>::kRow;
      if (row >= num_rows) continue;
      RowSum sum = sum_of_warps(row, results, scales), next;
      if (other) {
        hand_over(others + at, sum);
        continue;
      }
      take_over(next, inbox + at);
      if (own == 0) {
        sum.add(next);
      } else {  // the other block's part comes first
        next.add(sum);
        sum = next;
      }
      send_row(place + row * row_step, sum);
    }
  }
  KILN_FN void hand_over(float* to, const RowSum& sum) const {
    if (me.lane == 0) {
      const uint32_t scale[4] = {as_uint(sum.scale.top), as_uint(sum.scale.sum), 0, 0};
      store_words_cluster(to + Shape::kHeadTile, scale);
    }
#pragma unroll
    for (int pass = 0; pass < RowSum::kPasses; ++pass) {
      const int column = pass * 128 + me.lane * 4;
      const Float4& y = sum.y[pass];
      const uint32_t words[4] = {as_uint(y.x), as_uint(y.y), as_uint(y.z), as_uint(y.w)};
      if (column < x.head_dim) store_words_cluster(to + column, words);
    }
  }
  KILN_FN void take_over(RowSum& sum, const float* from) const {
    bool sent;
    do {
      Float4 scale;
      load_words_cluster(reinterpret_cast<uint32_t(&)[4]>(scale), from + Shape::kHeadTile);
      sent = is_sent(scale), sum.scale = {scale.x, scale.y};
#pragma unroll
      for (int pass = 0; pass < RowSum::kPasses; ++pass) {
        const int column = min(pass * 128 + me.lane * 4, x.head_dim - 4);
        load_words_cluster(reinterpret_cast<uint32_t(&)[4]>(sum.y[pass]), from + column);
        sent &= is_sent(sum.y[pass]);
      }
    } while (!__all_sync(kWarp, sent));
  }

  // Merge the parts as a tree of nodes, of 32 children above the first, in their first children's
  // places: a warp's rows of a node by the last of its children to arrive. Of what was sent, by the
  // block of the node's last part: all others come before it. Or by it and the other block of its
  // cluster, where that has the same part or the one before: those two run together. now: the item
  // in the table; `room`: shared memory of nobody else, where messages take 128 floats a warp.
  KILN_FN void merge_parts(int now, float* room) const {
    const int last = num_parts - 1;
    const int64_t first_item = now - item.part();  // of the tile's
    Children all = {parts, part_step, 0, halvings, mailed};
#pragma unroll 1
    for (int level = 0, bits = node_bits; 1 << level < num_parts; level += bits, bits = kFanBits) {
      const int node = part >> (level + bits) << (level + bits);
      const int end = min(last, node + (1 << (level + bits)) - 1);
      // Of parts that are not paired: whether the cluster has the last two.
      const bool before =
          kClusters && mailed && !paired && end > node && (first_item + end) % 2 == 1;
      if (mailed ? part < end - int(before) : me.warp >= num_rows) return;
      if (level > 0) all.halvings = 0;
      all.count = ((end - node) >> level) + 1, all.stride = part_step << level;
      if (all.count == 1) continue;  // its state is in place already
      if (!mailed && !is_last(first_item + node + (1 << level), all.count)) return;
      all.rows = parts + node * part_step + (level > 0 ? sum_step : 0);
      const bool root = node == 0 && end == last;
      const bool two = paired || before;
      merge_rows(all, root, two ? int(blockIdx.y % 2) : 0, two ? 2 : 1, room);
    }
  }

  // Rows `start`, start + step and so on, each by a warp; or by two, where more than eight parts of
  // it were sent and the warps do for all rows: another round costs more than a second half.
  KILN_FN void merge_rows(Children all, bool root, int start, int step, float* room) const {
    const bool halved = all.sent && all.count > kAtOnce && num_rows <= kWarps / 2 * step;
    const int warps = halved ? kWarps / 2 : kWarps;  // that have different rows
    const int half = halved ? (all.count > 2 * kAtOnce ? 2 : 1) * kAtOnce : all.count;
    const int own = me.warp % warps, begin = me.warp / warps * half;
    float* const first = all.rows;
    float* const other = room + own * 128 + me.lane * 4;
#pragma unroll 1
    for (; start < num_rows; start += warps * step) {
      const int row = start + own * step;
      all.rows = first + row * row_step;
#pragma unroll 1
      for (int column = me.lane * 4; column - me.lane * 4 < x.head_dim; column += 128) {
        const RowEnd to = row_end(row, column);
        Scale whole;
        Float4 y;
        __syncwarp();  // tells the compiler that all lanes are here: else each shuffle is two
        if (row < num_rows) {
          y = gather(whole, all, begin, min(all.count, begin + half), x.head_dim, column);
          if (begin > 0) store_vector(other, y);
        }
        if (halved) __syncthreads();  // the second sums are there, the scales were read
        if (row < num_rows && begin == 0) {
          if (halved) y = add(y, load_vector<Float4>(other));
          if (column < x.head_dim) {
            if (root) finish(to, y, whole);
            else send(all.rows + sum_step + column, y);
          }
          if (column - me.lane * 4 + 128 >= x.head_dim) {
            if (all.sent) forget_scales(all, x.head_dim);
            if (!root) send_scale(all.rows + sum_step + x.head_dim, whole, me.lane);
          }
        }
        if (halved) __syncthreads();  // the second sums were read
      }
    }
  }

  // Whether the others of a node's children have arrived before this warp's.
  KILN_FN bool is_last(int64_t arrival, int children) const {
    __syncwarp();  // the warp's rows are written
    uint32_t before = 0;
    if (me.lane == 0)
      before = arrive(x.arrivals + (arrival * heads.num_kv_heads + heads.head) * kWarps + me.warp,
                      children - 1);
    before = __shfl_sync(kWarp, before, 0);
    if (int(before) != children - 1) return false;
    __syncwarp();  // the other children's rows are seen
    return true;
  }
};

}  // namespace kiln
