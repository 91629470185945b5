// The end of a work item of decode attention: its warps' results become a row of out, or a partial
// result, which is added up by those who are sent a request's parts, or by who comes last of those
// that hold them.
#pragma once
#include "kiln/attention_fetch.cuh"
#include "kiln/attention_merge.cuh"
#include "kiln/ptx_cluster.cuh"

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

// What the end of an item starts from. It takes long to find out, so one thread does while the
// item's queries are on their way.
struct ItemPlace {
  float* parts;  // of the tile's rows
  float* place;  // of the item's result of the first row
  int64_t row_step, part_step;
  int64_t sum_step;  // from what a part sends to the sum of a node's, in its first child's place
  int num_parts, tile, part, num_rows, node_bits;
  bool mailed;

  // one_each: no block has two items.
  template <class T>
  KILN_FN static ItemPlace of(const Results<T>& x, const HeadRows& heads, const WorkItem& item,
                              bool one_each) {
    ItemPlace y;
    y.num_parts = item.num_parts(), y.tile = item.tile(), y.part = item.part();
    y.node_bits = node_bits_of(item.kind());
    y.mailed = one_each && y.num_parts <= kFanIn << y.node_bits;
    const int flat_rows = item.num_tokens() * heads.group;  // of all tiles
    y.num_rows = min(kTileRows, flat_rows - y.tile * kTileRows);
    y.row_step = int64_t(heads.num_kv_heads) * (x.head_dim + kScaleRoom);
    y.part_step = flat_rows * y.row_step;
    y.parts = (y.mailed ? x.mail : x.partials) + heads.head * (x.head_dim + kScaleRoom) +
              (item.row_start + y.tile * kTileRows) * y.row_step;
    y.sum_step = y.mailed ? x.mail_rows * y.row_step : 0;
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

  // Merge the warps' results of all rows, as a binary tree.
  KILN_FN void merge_warps(const float* results, const Scale (&scales)[kWarps][kTileRows]) const {
    float* to = place + me.warp * row_step;
#pragma unroll 1
    for (int row = me.warp; row < num_rows; row += kWarps, to += kWarps * row_step)
      merge_row(row, to, results, scales);
  }
  KILN_FN void merge_row(int row, float* to, const float* results,
                         const Scale (&scales)[kWarps][kTileRows]) const {
    constexpr int kPasses = (Shape::kHeadTile + 127) / 128;
    Scale own[kWarps];
    Fold folds[kWarps];
    Float4 y[kPasses][kWarps];
    auto add_up = [](auto add) {
#pragma unroll
      for (int step = 1; step < kWarps; step *= 2)
#pragma unroll
        for (int w = step; w < kWarps; w += 2 * step) add(w - step, w);
    };
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {  // all at once: nothing waits for the scales first
      own[w] = scales[w][row];
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass)
        y[pass][w] = load_vector<Float4>(results + w * (Shape::kWarpBytes / 4) +
                                         row * Shape::Tile::kPitch + pass * 128 +
                                         me.lane * 4 % Shape::kHeadTile);
    }
    add_up([&](int to, int w) {
      folds[w] = Fold::onto(own[to].top, own[w].top);
      own[to].sum = folds[w](own[to].sum, own[w].sum);
    });
    if (num_parts > 1) send_scale(to + x.head_dim, own[0], me.lane);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int column = pass * 128 + me.lane * 4;
      add_up([&](int to, int w) { y[pass][to] = folds[w](y[pass][to], y[pass][w]); });
      if (column >= x.head_dim) continue;
      if (num_parts > 1)
        send(to + column, y[pass][0]);
      else  // as were it merged with nothing: a zero loses its sign
        finish(row_end(row, column),
               Fold{0.0f, 1.0f}(Float4{0.0f, 0.0f, 0.0f, 0.0f}, y[pass][0]), own[0]);
    }
  }

  // Merge the parts as a tree of nodes, of 32 children above the first, in their first children's
  // places: a warp's rows of a node by the last of its children to arrive. Of what was sent, by the
  // block of the node's last part: all others come before it. Or by it and the other block of its
  // cluster, where that has the part before: those two run together. first_item: of the tile's, in
  // the table; `room`: shared memory that nobody else uses, where messages take 128 floats a warp.
  KILN_FN void merge_parts(int64_t first_item, float* room) const {
    const int last = num_parts - 1;
    Children all = {parts, part_step, 0, halvings_of(item.kind()), mailed};
#pragma unroll 1
    for (int level = 0, bits = node_bits; 1 << level < num_parts; level += bits, bits = kFanBits) {
      const int node = part >> (level + bits) << (level + bits);
      const int end = min(last, node + (1 << (level + bits)) - 1);
      const bool paired = kClusters && mailed && end > node && (first_item + end) % 2 == 1;
      if (mailed ? part < end - int(paired) : me.warp >= num_rows) return;
      if (level > 0) all.halvings = 0;
      all.count = ((end - node) >> level) + 1, all.stride = part_step << level;
      if (all.count == 1) continue;  // its state is in place already
      if (!mailed && !is_last(first_item + node + (1 << level), all.count)) return;
      all.rows = parts + node * part_step + (level > 0 ? sum_step : 0);
      const bool root = node == 0 && end == last;
      merge_rows(all, root, paired ? part % 2 : 0, paired ? 2 : 1, room);
    }
  }

  // Rows `start`, start + step and so on, each by a warp; or by two, where more than eight parts of
  // it were sent.
  KILN_FN void merge_rows(Children all, bool root, int start, int step, float* room) const {
    const bool halved = all.sent && all.count > kAtOnce;
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
