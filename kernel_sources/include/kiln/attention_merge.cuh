// What splitting attention over keys needs: the states of parts, their merge, and the end of a row.
#pragma once
#include "kiln/attention_logits.cuh"
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

// Four columns of the sum of n <= 32 parts, in their order; or, with SHARES > 1, of n / SHARES parts
// that are each the sum of so many shares, in their order. A lane brings the scale of the part, or
// share, of its number, and `whole` becomes that of all. Every lane of the warp takes part; one that
// is not `inside` reads nothing.
template <int SHARES>
KILN_FN Float4 gather(Scale own, Scale& whole, int n, const float* o, int64_t stride,
                      bool inside) {
  constexpr uint32_t kWarp = 0xffffffffu;
  constexpr int kAtOnce = 8;  // loads under way
  const Float4 zero = {0.0f, 0.0f, 0.0f, 0.0f};
  float top = own.top;                // of the part
  float weight = 1.0f, share = 0.0f;  // of the part in the whole, and of the share in the part
  Scale all = {minus_infinity(), 0.0f};
  Float4 y = zero, part = zero;
#pragma unroll 1
  for (int from = 0; from < n; from += kAtOnce) {
    Float4 v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      v[k] = inside && from + k < n ? load_vector<Float4>(o + (from + k) * stride) : zero;
    if (from == 0) {
#pragma unroll
      for (int m = 1; m < SHARES; m *= 2) top = fmaxf(top, __shfl_xor_sync(kWarp, top, m));
      all.top = warp_max(top);
      weight = Fold::below(all.top, top).added;
      if constexpr (SHARES > 1) {
        share = Fold::below(top, own.top).added;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < SHARES; ++k) {
          const int source = int(threadIdx.x) % 32 / SHARES * SHARES + k;
          const Fold f = {1.0f, __shfl_sync(kWarp, share, source)};
          sum = f(sum, __shfl_sync(kWarp, own.sum, source));
        }
        own.sum = sum;
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if constexpr (SHARES > 1) {
        part = Fold{1.0f, __shfl_sync(kWarp, share, from + k)}(k % SHARES ? part : zero, v[k]);
        if ((k + 1) % SHARES) continue;
      } else {
        part = v[k];
      }
      const Fold f = {1.0f, __shfl_sync(kWarp, weight, from + k)};
      all.sum = f(all.sum, __shfl_sync(kWarp, own.sum, from + k));
      y = f(y, part);
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
