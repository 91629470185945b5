// The end of a work item of decode attention: its warps' results become a row of out, or a partial
// result, which whoever comes last of those that hold a request's parts adds to theirs.
#pragma once
#include "kiln/attention_fetch.cuh"
#include "kiln/attention_merge.cuh"

namespace kiln {

// Row i of all tiles of a request is head i % group of token i / group.
struct HeadRows {
  int head, num_kv_heads, num_heads, group, inverse_group;
  KILN_FN int token_of(int row) const {
    return int(unsigned(row) * unsigned(inverse_group) >> 20);
  }
};

// Where results go.
template <class T> struct Results {
  T* out;
  float* lse;
  const float* sinks;
  uint32_t* arrivals;
  int head_dim;
  float v_scale;
};

template <class T, class Shape> struct ItemEnd {
  static constexpr uint32_t kWarp = 0xffffffffu;
  static constexpr int kWarps = Shape::kWarps;
  const Results<T>& x;
  const HeadRows& heads;
  const WorkItem& item;
  const Thread& me;
  int num_parts, tile, part, flat_rows, num_rows;
  bool divided, two, mailed;

  // one_each: no block has two items. begun: there is an item.
  KILN_FN ItemEnd(const Results<T>& results, const HeadRows& heads, const WorkItem& item,
                  const Thread& me, bool one_each, bool begun)
      : x(results), heads(heads), item(item), me(me) {
    two = kWarps == 4 && item.kind() == Part::two_shares;
    divided = two || item.kind() == Part::share;
    num_parts = item.num_parts(), tile = item.tile(), part = item.part();
    mailed = one_each && num_parts <= kFanIn;
    flat_rows = item.num_tokens() * heads.group;  // of all tiles
    num_rows = begun ? min(kTileRows, flat_rows - tile * kTileRows) : 0;
  }

  KILN_FN void finish(int row, int column, Float4 y, Scale whole) const {
    const int flat = tile * kTileRows + row, token = heads.token_of(flat);
    const int h = heads.head * heads.group + flat - token * heads.group;
    const int64_t to = int64_t(item.first_token + token) * heads.num_heads + h;
    const float f = end_row(x.lse && column == 0 ? x.lse + to : nullptr,
                            x.sinks ? x.sinks + h : nullptr, whole, x.v_scale);
    store_row(x.out + to * x.head_dim + column, y, f);
  }

  // Merge the warps' results of a row, in warp order; of two shares those of one. place: of the row
  // in this part.
  KILN_FN void merge_warps(int row, int second, float* place, const float* results,
                           const Scale (&scales)[kWarps][kTileRows]) const {
    Scale whole = {minus_infinity(), 0.0f};
    Fold folds[kWarps] = {};
    Scale own[kWarps];
    const int half = two, first = 2 * second;
    auto warp_of = [&](int w) { return first + (w >> half); };
    auto row_of = [&](int w) { return (w & half) * 8 + row; };
#pragma unroll
    for (int w = 0; w < kWarps; ++w) own[w] = scales[warp_of(w)][row_of(w)];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {  // units one by one, as a warp does that has them all
      if (divided) folds[w] = Fold::onto(whole.top, own[w].top);
      else whole.top = fmaxf(whole.top, own[w].top);
    }
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (!divided) folds[w] = Fold::below(whole.top, own[w].top);
      whole.sum = folds[w](whole.sum, own[w].sum);
    }
#pragma unroll 1
    for (int column = me.lane * 4; column < x.head_dim; column += 128) {
      Float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        y = folds[w](y, load_vector<Float4>(results + warp_of(w) * (Shape::kWarpBytes / 4) +
                                            row_of(w) * Shape::Tile::kPitch + column));
      if (num_parts == 1)  // as were it merged with nothing: a zero loses its sign
        finish(row, column, Fold{0.0f, 1.0f}(Float4{0.0f, 0.0f, 0.0f, 0.0f}, y), whole);
      else
        send(place + column, y);
    }
    if (num_parts > 1) send_scale(place + x.head_dim, whole, me.lane);
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
