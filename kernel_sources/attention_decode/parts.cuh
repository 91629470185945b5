// The end of a decode work item: merges the results of its warps, then stores rows of `out`, or
// partial results, which it merges with those of the request's other items. A cluster's two items,
// halves or quarters of one split, may be merged into one part first.
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

// Destinations. Partial results: [part][row of all tiles][KV head], from the request's row_start.
template <class T> struct Results {
  T* out;
  float* lse;
  const float* sinks;
  float *partials, *mail;
  int mail_rows;  // of parts; as many rows for sums of nodes follow
  uint32_t* arrivals;
  int head_dim;
  float v_scale;
};

// Whether partial results go through the mailbox. one_each: no block has two items.
KILN_FN bool is_mailed(const WorkItem& item, bool one_each) {
  return one_each && item.num_parts() <= kFanIn << node_bits_of(item.kind());
}
// Whether the cluster's two items are merged into one part first. That pays if the request has many
// parts; its code is worth its size in blocks of four warps only.
template <class Shape> constexpr bool kPairs = kClusters && Shape::kWarps == 4;
template <class Shape> KILN_FN bool is_paired(const WorkItem& item, bool one_each) {
  return kPairs<Shape> && is_mailed(item, one_each) && halvings_of(item.kind()) > 0 &&
         item.num_parts() > 8 && (int(blockIdx.y) - item.part()) % 2 == 0;
}

// Paired blocks exchange every second row through distributed shared memory, in the half of the
// query tile that items of up to 8 rows leave unused. Words not yet received are kUnsent.
template <class Shape> struct Inbox {
  static constexpr int kRow = Shape::kHeadTile + 4;  // floats
  static constexpr int kRows = kTileRows / 4;        // half of up to 8 rows
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

// Where an item's results go, and its place in the tree. It takes long to compute, so thread 0 does
// so while the item's queries are loading.
struct ItemPlace {
  float* parts;  // part 0 of the tile's first row
  float* place;  // this part of the tile's first row
  int64_t row_step, part_step;
  int64_t sum_step;  // from the row of a node's first child to the node's sum
  int num_parts, first_row, part, num_rows, node_bits, halvings;
  int num_requests;  // each has num_rows rows, one request after the other
  int counter, counter_step;  // of part 0, and from one part to the next
  bool mailed;
  bool paired;  // the cluster's items form one part; each block has every second row

  template <class Shape, class T>
  KILN_FN static ItemPlace of(const Results<T>& x, const HeadRows& heads, const WorkItem& item,
                              bool one_each) {
    ItemPlace y;
    y.num_parts = item.num_parts(), y.first_row = item.tile() * kTileRows, y.part = item.part();
    y.node_bits = node_bits_of(item.kind()), y.halvings = halvings_of(item.kind());
    y.mailed = is_mailed(item, one_each);
    const int flat_rows = item.num_tokens() * heads.group;  // of all tiles
    y.num_requests = item.is_shared() ? item.num_tokens() : 1;
    y.num_rows = item.is_shared() ? heads.group : min(kTileRows, flat_rows - y.first_row);
    y.counter = item.row_start + y.first_row;
    y.counter_step = flat_rows + item.other_tokens() * heads.group;
    y.row_step = int64_t(heads.num_kv_heads) * (x.head_dim + kScaleRoom);
    y.part_step = y.counter_step * y.row_step;
    y.parts = (y.mailed ? x.mail : x.partials) + heads.head * (x.head_dim + kScaleRoom) +
              y.counter * y.row_step;
    y.sum_step = y.mailed ? x.mail_rows * y.row_step : 0;
    y.paired = is_paired<Shape>(item, one_each);
    if (y.paired) y.num_parts /= 2, y.part /= 2, --y.node_bits, --y.halvings;
    // A last part that is alone in its node is that node's sum too.
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

  // Addresses of four columns of a row of out, its lse and its sink: known before the merge.
  struct RowEnd {
    T* out;
    float* lse;
    const float* sink;
  };
  KILN_FN RowEnd row_end(int row, int column) const {
    const int flat = first_row + row, token = heads.token_of(flat);
    const int h = heads.head * heads.group + flat - token * heads.group;
    const int64_t to = int64_t(item.first_token + token) * heads.num_heads + h;
    return {x.out + to * x.head_dim + column, x.lse && column == 0 ? x.lse + to : nullptr,
            x.sinks ? x.sinks + h : nullptr};
  }
  KILN_FN void finish(const RowEnd& to, Float4 y, Scale whole) const {
    store_row(to.out, y, end_row(to.lse, to.sink, whole, x.v_scale));
  }

  // A lane's columns of one row, four per pass, and the row's scale.
  struct RowSum {
    static constexpr int kPasses = (Shape::kHeadTile + 127) / 128;
    Scale scale;
    Float4 y[kPasses];

    KILN_FN void add(const RowSum& next) {
      const MergeFactors f = MergeFactors::update_top(scale.top, next.scale.top);
      scale.sum = f(scale.sum, next.scale.sum);
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) y[pass] = f(y[pass], next.y[pass]);
    }
  };
  // Merge one row over the block's warps, as a binary tree.
  KILN_FN RowSum sum_of_warps(int row, const float* results, const Scale* scales) const {
    RowSum own[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {  // issue all loads first: none waits for a scale
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
      // Add to +0 as other merges do, so that -0 becomes +0.
      finish(row_end(row, column),
             MergeFactors{0.0f, 1.0f}(Float4{0.0f, 0.0f, 0.0f, 0.0f}, sum.y[pass]), sum.scale);
    }
  }

  // Merge the rows over the warps; store or send them.
  KILN_FN void merge_warps(const float* results, const Scale* scales) const {
#pragma unroll 1
    for (int first = 0; first < num_requests * num_rows; first += num_rows) {
      float* to = place + (first + me.warp) * row_step;
#pragma unroll 1
      for (int row = me.warp; row < num_rows; row += kWarps, to += kWarps * row_step) {
        const RowSum sum = sum_of_warps(first + row, results, scales);
        if (num_parts > 1) send_row(to, sum);
        else finish_row(row, sum);
      }
    }
  }
  // Merge the rows of paired blocks: send the other block its rows, and merge the rows that it
  // sends.
  KILN_FN void merge_blocks(const float* results, const Scale* scales, float* inbox) const {
    const int own = int(blockIdx.y % 2);
    float* const others = map_shared(inbox, 1 - own);
#pragma unroll 1
    for (int n = 2 * me.warp; n / 2 * 2 < num_rows; n += n % 2 ? 2 * kWarps - 1 : 1) {
      const bool other = n % 2 == 0;  // the other block's row first, then this block's
      const int row = n / 2 * 2 + (other ? 1 - own : own), at = n / 2 * Inbox<Shape>::kRow;
      if (row >= num_rows) continue;
      RowSum sum = sum_of_warps(row, results, scales), next;
      if (other) {
        send_to_peer(others + at, sum);
        continue;
      }
      receive_from_peer(next, inbox + at);
      if (own == 0) {
        sum.add(next);
      } else {  // the other block's part precedes this one
        next.add(sum);
        sum = next;
      }
      send_row(place + row * row_step, sum);
    }
  }
  KILN_FN void send_to_peer(float* to, const RowSum& sum) const {
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
  KILN_FN void receive_from_peer(RowSum& sum, const float* from) const {
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

  // Merge parts node by node: 2^node_bits parts, then 32 children per node. A node's sum takes the
  // place of its first child (+ sum_step). Counters: each warp counts its rows, the last to arrive
  // merges them. Mailbox: the block of the node's last part merges, or both blocks of its cluster
  // if the other block holds the same part or the one before. They wait for earlier blocks only, or
  // for each other: all of them are running. now: index of the item. room: shared memory that
  // nothing else uses, 128 floats per warp.
  KILN_FN void merge_parts(int now, float* room) const {
    const int last = num_parts - 1;
    const int64_t first_item = now - item.part();  // of the tile's
    Children all = {parts, part_step, 0, halvings, mailed};
#pragma unroll 1
    for (int level = 0, bits = node_bits; 1 << level < num_parts; level += bits, bits = kFanBits) {
      const int node = part >> (level + bits) << (level + bits);
      const int end = min(last, node + (1 << (level + bits)) - 1);
      // For parts that are not paired: whether this cluster holds the last two.
      const bool before =
          kClusters && mailed && !paired && end > node && (first_item + end) % 2 == 1;
      if (mailed ? part < end - int(before) : me.warp >= num_rows) return;
      if (level > 0) all.halvings = 0;
      all.count = ((end - node) >> level) + 1, all.stride = part_step << level;
      if (all.count == 1) continue;  // its sum is already in place
      if (!mailed && !is_last(counter + (node + (1 << level)) * counter_step, all.count)) return;
      all.rows = parts + node * part_step + (level > 0 ? sum_step : 0);
      const bool root = node == 0 && end == last;
      const bool two = paired || before;
      merge_rows(all, root, two ? int(blockIdx.y % 2) : 0, two ? 2 : 1, room);
    }
  }

  // Merge rows start, start + step, .., one warp per row. Two warps share a row if more than eight
  // parts were sent and half of the warps suffice for all rows: a second round of loads costs more.
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
        __syncwarp();  // converges the lanes: else the compiler emits each shuffle twice
        if (row < num_rows) {
          y = gather(whole, all, begin, min(all.count, begin + half), x.head_dim, column);
          if (begin > 0) store_vector(other, y);
        }
        if (halved) __syncthreads();  // the second sums are written, the scales were read
        if (row < num_rows && begin == 0) {
          if (halved) y = add(y, load_vector<Float4>(other));
          if (column < x.head_dim) {
            if (root) finish(to, y, whole);
            else send(all.rows + sum_step + column, y);
          }
          if (column - me.lane * 4 + 128 >= x.head_dim) {
            if (all.sent) reset_scales(all, x.head_dim);
            if (!root) send_scale(all.rows + sum_step + x.head_dim, whole, me.lane);
          }
        }
        if (halved) __syncthreads();  // the second sums were read
      }
    }
  }

  // Go on to the rows of the next request of a shared item.
  KILN_FN void next_request() {
    first_row += num_rows, counter += num_rows;
    parts += num_rows * row_step;
  }

  // Return whether all other children of the node arrived before this warp's. Their counter is
  // that of the second child's first row.
  KILN_FN bool is_last(int64_t arrival, int children) const {
    __syncwarp();  // the warp's rows are written
    uint32_t before = 0;
    if (me.lane == 0)
      before = arrive(x.arrivals + (arrival * heads.num_kv_heads + heads.head) * kWarps + me.warp,
                      children - 1);
    before = __shfl_sync(kWarp, before, 0);
    if (int(before) != children - 1) return false;
    __syncwarp();  // the other children's rows are visible
    return true;
  }
};

}  // namespace kiln
