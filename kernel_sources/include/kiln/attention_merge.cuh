// What splitting attention over keys needs: the states of parts, their merge, and the end of a row.
#pragma once
#include "kiln/attention_logits.cuh"
#include "kiln/ptx_mma.cuh"

namespace kiln {

// Of a row's unnormalised result: both are relative to 2^top, the greatest logit in log2 units.
struct alignas(8) Scale { float top, sum; };
struct alignas(16) Float4 { float x, y, z, w; };
struct alignas(8) Words2 { uint32_t x, y; };

KILN_FN Float4 add_scaled(Float4 y, Float4 v, float f) {
  return {y.x + v.x * f, y.y + v.y * f, y.z + v.z * f, y.w + v.w * f};
}

// A warp's merge of n <= 32 states, a lane a state: of all, and the weight of this lane's own.
KILN_FN Scale weigh(Scale own, float& weight) {
  const float top = warp_max(own.top);
  weight = exp2_fast(own.top - finite(top));
  return {top, warp_sum(own.sum * weight)};
}
// Four columns of the merge of n <= 32 states, in their order. A lane brings the scale of the state
// of its number, and `whole` becomes that of all. Every lane of the warp takes part; one that is
// not `inside` reads nothing.
KILN_FN Float4 gather(Scale own, Scale& whole, int n, const float* o, int64_t stride, bool inside) {
  constexpr int kAtOnce = 8;  // loads under way
  Float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
  float weight = 0.0f;
#pragma unroll 1
  for (int from = 0; from < n; from += kAtOnce) {
    Float4 v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      v[k] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (inside && from + k < n) v[k] = load_vector<Float4>(o + (from + k) * stride);
    }
    if (from == 0) whole = weigh(own, weight);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      y = add_scaled(y, v[k], __shfl_sync(0xffffffffu, weight, from + k));
  }
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
