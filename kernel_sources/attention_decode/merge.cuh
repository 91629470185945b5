// States of partial attention results, how to merge them, and how to finish a row.
#pragma once
#include "kiln/attention/logits.cuh"
#include "kiln/math/order.cuh"
#include "kiln/ptx/memory.cuh"
#include "kiln/ptx/mma.cuh"
#include "kiln/ptx/warp.cuh"

namespace kiln {

// Scale of an unnormalised row, relative to 2^top. top is near the largest logit, in log2 units.
struct alignas(8) Scale { float top, sum; };
struct alignas(16) Float4 { float x, y, z, w; };
struct alignas(8) Words2 { uint32_t x, y; };

// Factors of one merge step. Every merge path uses exactly these operations, so a row's bits do not
// depend on which path merged it.
struct MergeFactors {
  float old, added;  // factors

  // Running merge: on entry `top` belongs to the sum so far, on return to the merged sum.
  KILN_FN static MergeFactors update_top(float& top, float top_of_part) {
    const float greatest = fmaxf(top, top_of_part), zero = finite(greatest);
    const MergeFactors f = {exp2_fast(top - zero), exp2_fast(top_of_part - zero)};
    top = greatest;
    return f;
  }
  // Merge with the largest top known in advance.
  KILN_FN static MergeFactors relative_to(float greatest, float top_of_part) {
    return {1.0f, exp2_fast(top_of_part - finite(greatest))};
  }
  KILN_FN float operator()(float sum, float part) const {
    return fma_rn(part, added, mul_rn(sum, old));
  }
  KILN_FN Float4 operator()(Float4 sum, Float4 part) const {
    return {(*this)(sum.x, part.x), (*this)(sum.y, part.y), (*this)(sum.z, part.z),
            (*this)(sum.w, part.w)};
  }
};

// A row of partial results has head_dim columns, then its Scale, then padding up to 32 bytes. A
// partly written 32-byte sector would make the memory fetch the rest, and delay its readers.
constexpr int kScaleRoom = 8;

// Mailbox: a row sent through global memory as sentinel-marked words, without a counter. It has
// arrived once no word is kUnsent, a NaN that arithmetic never yields. The reader resets it to
// kUnsent.
constexpr uint32_t kUnsent = 0xffffffffu;
KILN_FN void send(float* to, const Float4& x) {
  store_words_relaxed(to, {as_uint(x.x), as_uint(x.y), as_uint(x.z), as_uint(x.w)});
}
// Readers ignore the padding after the scale: it may arrive after the reader has reset the row.
KILN_FN void send_scale(float* to, Scale x, int lane) {
  const uint32_t top = lane == 0 ? as_uint(x.top) : kUnsent;
  const uint32_t sum = lane == 0 ? as_uint(x.sum) : kUnsent;
  if (lane < kScaleRoom / 4) store_words_relaxed(to + lane * 4, {top, sum, kUnsent, kUnsent});
}
template <class V> KILN_FN void receive(V& v, const float* from) {
  load_words_relaxed(reinterpret_cast<uint32_t(&)[sizeof(V) / 4]>(v), from);
}
KILN_FN void reset_message(float* message) {
  store_words_relaxed(message, {kUnsent, kUnsent, kUnsent, kUnsent});
}
template <class V> KILN_FN bool is_sent(const V& v) {
  bool sent = true;
#pragma unroll
  for (int i = 0; i < int(sizeof(V) / 4); ++i)
    sent &= reinterpret_cast<const uint32_t*>(&v)[i] != kUnsent;
  return sent;
}

// Rows to merge: up to 32, `stride` floats apart. Each is the result of a split, or of a half or
// quarter of one (halvings 1, 2). sent: they arrive through the mailbox.
struct Children {
  float* rows;
  int64_t stride;
  int count, halvings;
  bool sent;
};
constexpr int kAtOnce = 8;  // children whose loads are in flight at a time

// Binary tree over up to 32 children; missing ones count as empty. The first `halvings` steps
// rebuild a split, each relative to the pair's own top. The next step scales to the top of all
// children; later steps only add. Lane i holds the factors of child i for the first three steps.
struct Tree {
  float factors[3];

  // own: Scale of this lane's child, {-infinity, 0} if it is missing. whole: set to the total's
  // Scale.
  KILN_FN static Tree of(Scale own, int halvings, Scale& whole) {
    constexpr uint32_t kWarp = 0xffffffffu;
    const int lane = threadIdx.x % 32;
    Tree tree = {{1.0f, 1.0f, 1.0f}};
    whole.top = value_of(warp_largest(key_of(own.top)));
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      if (step >= halvings) continue;
      const int other = 1 << step, first = lane & ~other;
      const float top = fmaxf(own.top, __shfl_xor_sync(kWarp, own.top, other));
      const float factor = MergeFactors::relative_to(top, own.top).added;
      const MergeFactors f = {__shfl_sync(kWarp, factor, first),
                              __shfl_sync(kWarp, factor, first + other)};
      const float sum = __shfl_sync(kWarp, own.sum, first);
      own = {top, f(sum, __shfl_sync(kWarp, own.sum, first + other))};
      tree.factors[step] = factor;
    }
    const float weight = MergeFactors::relative_to(whole.top, own.top).added;
#pragma unroll
    for (int step = 0; step < 3; ++step)
      if (step == halvings) tree.factors[step] = weight;
    float sum = lane & ((1 << halvings) - 1) ? 0.0f : mul_rn(own.sum, weight);
#pragma unroll
    for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(kWarp, sum, other);
    whole.sum = sum;
    return tree;
  }

  // Return the sum of children first .. first + 7, whose rows are v; zeros for missing children.
  KILN_FN Float4 sum(Float4 (&v)[kAtOnce], int first) const {
#pragma unroll
    for (int step = 0; step < 3; ++step)
#pragma unroll
      for (int k = 0; k < kAtOnce; k += 2 << step) {
        const int other = k + (1 << step);
        const MergeFactors f = {__shfl_sync(0xffffffffu, factors[step], first + k),
                                __shfl_sync(0xffffffffu, factors[step], first + other)};
        v[k] = f(v[k], v[other]);
      }
    return v[0];
  }
};
// Reset the scales. Every warp that waits for them must have read them.
KILN_FN void reset_scales(const Children& sent, int head_dim) {
  float* scale = sent.rows + min(int(threadIdx.x % 32), sent.count - 1) * sent.stride + head_dim;
#pragma unroll
  for (int i = 0; i < kScaleRoom; i += 4) reset_message(scale + i);
}
KILN_FN Float4 add(Float4 a, Float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Return four columns, from `column` on, of the sum of children begin .. end - 1; `whole` becomes
// the scale of all children. Rows that were sent are awaited, then reset for the next launch. All
// lanes take part: lane i passes its own column, 4 i after lane 0's. Results past head_dim are
// undefined.
KILN_FN Float4 gather(Scale& whole, const Children& of, int begin, int end, int head_dim,
                      int column) {
  constexpr uint32_t kWarp = 0xffffffffu;
  const int lane = threadIdx.x % 32;
  const float* const own_scale = of.rows + min(lane, of.count - 1) * of.stride + head_dim;
  float* next = of.rows + begin * of.stride + min(column, head_dim - 4);
  Scale own = {minus_infinity(), 0.0f};
  if (!of.sent && lane < of.count) own = load_vector<Scale>(own_scale);
  Tree tree;
  Float4 before = {0.0f, 0.0f, 0.0f, 0.0f}, y = before;
#pragma unroll 1
  for (int from = begin; from < end; from += kAtOnce, next += kAtOnce * of.stride) {
    Float4 v[kAtOnce] = {};
    const int left = end - from;
    if (of.sent) {
      // Past the end, reread the last row: a branch would make each load wait for the one before.
      auto each = [&](auto act) {
        float* place = next;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          act(v[k], place);
          if (k + 1 < left) place += of.stride;
        }
      };
      bool sent;
      do {
        if (from == begin) receive(own, own_scale);
        each([&](Float4& x, const float* place) { receive(x, place); });
        sent = is_sent(own);
        each([&](Float4& x, const float*) { sent &= is_sent(x); });
      } while (!__all_sync(kWarp, sent));
      each([&](Float4&, float* place) { reset_message(place); });
      if (lane >= of.count) own = {minus_infinity(), 0.0f};
      if (left < kAtOnce)
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
          if (k >= left) v[k] = {0.0f, 0.0f, 0.0f, 0.0f};
    } else {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (column < head_dim && k < left) v[k] = load_vector<Float4>(next + k * of.stride);
    }
    if (from == begin) tree = Tree::of(own, of.halvings, whole);
    const Float4 eight = tree.sum(v, from);
    if ((from - begin) % (2 * kAtOnce) == 0) before = add(before, y), y = eight;
    else y = add(y, eight);
  }
  return add(before, y);
}

// Return the factor that turns an unnormalised row into its output: v_scale / sum. A sink adds one
// logit without a value to the sum. A row without visible keys gets factor 0 and lse -infinity.
KILN_FN float end_row(float* lse, const float* sink, Scale x, float v_scale) {
  float f = v_scale;
  if (sink) {
    const float one_more = *sink * kLog2e, top = fmaxf(x.top, one_more);
    const float rest = exp2_fast(x.top - top);
    f *= rest;
    x = {top, x.sum * rest + exp2_fast(one_more - top)};
  }
  if (lse) *lse = x.sum > 0 ? (x.top + log2_fast(x.sum)) * kLn2 : minus_infinity();
  return x.sum > 0 ? f * reciprocal_fast(x.sum) : 0.0f;
}
template <class T> KILN_FN void store_row(T* out, Float4 y, float f) {  // four columns
  store_vector(out, Words2{pack<T>(y.x * f, y.y * f), pack<T>(y.z * f, y.w * f)});
}

}  // namespace kiln
