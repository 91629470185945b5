// What splitting attention over keys needs: the states of parts, their merge, and the end of a row.
#pragma once
#include "kiln/attention/logits.cuh"
#include "kiln/math/order.cuh"
#include "kiln/ptx/memory.cuh"
#include "kiln/ptx/mma.cuh"
#include "kiln/ptx/warp.cuh"

namespace kiln {

// Of a row's unnormalised result, relative to 2^top; top is near the greatest logit, in log2 units.
struct alignas(8) Scale { float top, sum; };
struct alignas(16) Float4 { float x, y, z, w; };
struct alignas(8) Words2 { uint32_t x, y; };

// One step of a sum of parts: that of some onto that of those before them. Every way to add up parts
// takes the very same steps, so that the bits do not tell who added them up.
struct Fold {
  float old, added;  // factors

  // Where the parts come one by one. top: of the sum before, and then of the sum with the part.
  KILN_FN static Fold onto(float& top, float top_of_part) {
    const float greatest = fmaxf(top, top_of_part), zero = finite(greatest);
    const Fold f = {exp2_fast(top - zero), exp2_fast(top_of_part - zero)};
    top = greatest;
    return f;
  }
  // Where all are known before.
  KILN_FN static Fold below(float greatest, float top_of_part) {
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

// A row of partial results: head_dim columns, then its scale, and kUnsent up to 32 bytes: of a part of
// them the memory has to fetch the rest, and who reads it waits for that.
constexpr int kScaleRoom = 8;

// A row is also a message that needs no counter: it is there once no word of it is kUnsent, which
// is not the NaN of arithmetic, 0x7fffffff. Who receives it makes it kUnsent for the launch after.
constexpr uint32_t kUnsent = 0xffffffffu;
KILN_FN void send(float* to, const Float4& x) {
  store_words_relaxed(to, {as_uint(x.x), as_uint(x.y), as_uint(x.z), as_uint(x.w)});
}
// Nobody waits for what follows the scale: it may come after who received this made it kUnsent.
KILN_FN void send_scale(float* to, Scale x, int lane) {
  const uint32_t top = lane == 0 ? as_uint(x.top) : kUnsent;
  const uint32_t sum = lane == 0 ? as_uint(x.sum) : kUnsent;
  if (lane < kScaleRoom / 4) store_words_relaxed(to + lane * 4, {top, sum, kUnsent, kUnsent});
}
template <class V> KILN_FN void receive(V& v, const float* from) {
  load_words_relaxed(reinterpret_cast<uint32_t(&)[sizeof(V) / 4]>(v), from);
}
KILN_FN void forget(float* message) {
  store_words_relaxed(message, {kUnsent, kUnsent, kUnsent, kUnsent});
}
template <class V> KILN_FN bool is_sent(const V& v) {
  bool sent = true;
#pragma unroll
  for (int i = 0; i < int(sizeof(V) / 4); ++i)
    sent &= reinterpret_cast<const uint32_t*>(&v)[i] != kUnsent;
  return sent;
}

// What a row is the sum of: `count` rows, up to 32, `stride` floats apart, each of a part, or of half
// or a quarter of one.
struct Children {
  float* rows;
  int64_t stride;
  int count, halvings;
  bool sent;
};
constexpr int kAtOnce = 8;  // children whose rows are under way at a time

// The tree in which children are added up, two by two, whichever of them there are. Up to a part a
// sum is relative to its own top, above it to that of all. A lane has what belongs to the child of
// its number: the factors of three steps; above them there are none.
struct Tree {
  float factors[3];

  // own: of the child of the lane's number, -infinity and 0 where there is none. `whole`: of all.
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
      const float factor = Fold::below(top, own.top).added;
      const Fold f = {__shfl_sync(kWarp, factor, first),
                      __shfl_sync(kWarp, factor, first + other)};
      const float sum = __shfl_sync(kWarp, own.sum, first);
      own = {top, f(sum, __shfl_sync(kWarp, own.sum, first + other))};
      tree.factors[step] = factor;
    }
    const float weight = Fold::below(whole.top, own.top).added;
#pragma unroll
    for (int step = 0; step < 3; ++step)
      if (step == halvings) tree.factors[step] = weight;
    float sum = lane & ((1 << halvings) - 1) ? 0.0f : mul_rn(own.sum, weight);
#pragma unroll
    for (int other = 1; other < 32; other *= 2) sum += __shfl_xor_sync(kWarp, sum, other);
    whole.sum = sum;
    return tree;
  }

  // The sum of rows of children from `first` on; zeros where there is none.
  KILN_FN Float4 sum(Float4 (&v)[kAtOnce], int first) const {
#pragma unroll
    for (int step = 0; step < 3; ++step)
#pragma unroll
      for (int k = 0; k < kAtOnce; k += 2 << step) {
        const int other = k + (1 << step);
        const Fold f = {__shfl_sync(0xffffffffu, factors[step], first + k),
                        __shfl_sync(0xffffffffu, factors[step], first + other)};
        v[k] = f(v[k], v[other]);
      }
    return v[0];
  }
};
// Once all who wait for the scales have them.
KILN_FN void forget_scales(const Children& sent, int head_dim) {
  float* scale = sent.rows + min(int(threadIdx.x % 32), sent.count - 1) * sent.stride + head_dim;
#pragma unroll
  for (int i = 0; i < kScaleRoom; i += 4) forget(scale + i);
}
KILN_FN Float4 add(Float4 a, Float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// Four columns, from `column` on, of the sum of children `begin` to `end`; `whole` becomes the
// scale of all. Where they were sent, wait for them, and leave no rows for the launch after. Every
// lane of the warp takes part, for columns 4 lane on from the first one's; past head_dim its result
// is of no use.
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
      // A place is read twice rather than not: else each load would wait for the one before.
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
      each([&](Float4&, float* place) { forget(place); });
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

// The end of a row: return what its result is to be multiplied by, that is divided by the sum, to
// which the sink adds one logit without a value. Without a key 0, and -infinity for lse.
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
