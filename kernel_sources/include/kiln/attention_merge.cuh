// What splitting attention over keys needs: the states of parts, their merge, and the end of a row.
#pragma once
#include "kiln/attention_logits.cuh"
#include "kiln/ptx_memory.cuh"
#include "kiln/ptx_mma.cuh"

namespace kiln {

// Of a row's unnormalised result, relative to 2^top; top is near the greatest logit, in log2 units.
struct alignas(8) Scale { float top, sum; };
struct alignas(16) Float4 { float x, y, z, w; };
struct alignas(8) Words2 { uint32_t x, y; };

// One step of a sum of parts in their order: that of a part onto that of those before. Every way to
// add up parts takes the very same steps, so that the bits do not tell who added them up.
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

// What a row is the sum of: `count` rows `stride` floats apart, or as many messages, each of a part,
// or of half or a quarter of one.
struct Children {
  float* rows;
  int64_t stride;
  int count, halvings;
  bool mailed;
};

// Four columns, from `column` on, of the sum of up to 32 parts in their order, after halves and
// quarters were added up to parts. `whole` becomes the scale of all. Every lane of the warp takes
// part, for columns 4 lane on from the first one's; past head_dim its result is of no use.
KILN_FN Float4 gather(Scale& whole, const Children& of, int head_dim, int column) {
  constexpr uint32_t kWarp = 0xffffffffu;
  constexpr int kAtOnce = 8;  // loads under way
  const int lane = threadIdx.x % 32, n = of.count;
  const int64_t stride = of.stride;
  const Float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
  float* const own_scale = of.rows + min(lane, n - 1) * stride + head_dim;
  float* next = of.rows + min(column, head_dim - 4);
  Scale own = {minus_infinity(), 0.0f};  // of the child of the lane's number, then of its part
  if (!of.mailed && lane < n) own = load_vector<Scale>(own_scale);
  float weight = 1.0f, in_half = 1.0f, in_part = 1.0f;  // of the child's in what is next
  Scale all = {minus_infinity(), 0.0f};
  Float4 y = zero;
  // A step of the tree: of the lane's own sum and that of the lane `other` further on.
  auto pair_up = [&](float& factor, int other) {
    const float top = fmaxf(own.top, __shfl_xor_sync(kWarp, own.top, other));
    factor = Fold::below(top, own.top).added;
    const int first = lane & ~other;
    const Fold f = {__shfl_sync(kWarp, factor, first), __shfl_sync(kWarp, factor, first + other)};
    const float sum = __shfl_sync(kWarp, own.sum, first);
    own = {top, f(sum, __shfl_sync(kWarp, own.sum, first + other))};
  };
#pragma unroll 1
  for (int from = 0; from < n; from += kAtOnce) {
    Float4 v[kAtOnce] = {};
    const int left = n - from;
    if (of.mailed) {  // a place is read twice rather than not: else each load waits for the last
      auto each = [&](auto act) {
        float* place = next;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          act(k, place);
          if (k + 1 < left) place += stride;
        }
      };
      bool sent;
      do {
        if (from == 0) receive(own, own_scale);
        each([&](int k, const float* place) { receive(v[k], place); });
        sent = is_sent(own);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) sent &= is_sent(v[k]);
      } while (!__all_sync(kWarp, sent));
      each([&](int k, float* place) {
        forget(place);
        if (k >= left) v[k] = zero;
      });
      if (from == 0) {
        if (column - lane * 4 + 128 >= head_dim)  // nobody needs the scales again
          for (int i = 0; i < kScaleRoom; i += 4) forget(own_scale + i);
        if (lane >= n) own = {minus_infinity(), 0.0f};
      }
      next += kAtOnce * stride;
    } else {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k, next += stride)
        if (column < head_dim && k < left) v[k] = load_vector<Float4>(next);
    }
    if (from == 0) {
      if (of.halvings > 0) pair_up(in_half, 1);
      if (of.halvings > 1) pair_up(in_part, 2);
      all.top = warp_max(own.top);
      weight = Fold::below(all.top, own.top).added;
    }
    auto pair = [&](float factor, int k, int other) {
      const Fold f = {__shfl_sync(kWarp, factor, from + k),
                      __shfl_sync(kWarp, factor, from + k + other)};
      v[k] = f(v[k], v[k + other]);
    };
    auto add = [&](int k) {
      const Fold f = {1.0f, __shfl_sync(kWarp, weight, from + k)};
      all.sum = f(all.sum, __shfl_sync(kWarp, own.sum, from + k));
      y = f(y, v[k]);
    };
    if (of.halvings == 0) {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) add(k);
      continue;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; k += 2) pair(in_half, k, 1);
    if (of.halvings == 1) {
#pragma unroll
      for (int k = 0; k < kAtOnce; k += 2) add(k);
    } else {
#pragma unroll
      for (int k = 0; k < kAtOnce; k += 4) pair(in_part, k, 2), add(k);
    }
  }
  whole = all;
  return y;
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
  return x.sum > 0 ? f / x.sum : 0.0f;
}
template <class T> KILN_FN void store_row(T* out, Float4 y, float f) {  // four columns
  store_vector(out, Words2{pack<T>(y.x * f, y.y * f), pack<T>(y.z * f, y.w * f)});
}

}  // namespace kiln
