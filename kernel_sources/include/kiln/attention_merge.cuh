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
// Four columns of a merge, in the states' order. Every lane of the warp takes part; one that is
// not `inside` reads nothing.
KILN_FN Float4 gather(float weight, int n, const float* o, int64_t stride, bool inside) {
  Float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 4
  for (int k = 0; k < n; ++k) {
    Float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
    if (inside) v = load_vector<Float4>(o + k * stride);
    y = add_scaled(y, v, __shfl_sync(0xffffffffu, weight, k));
  }
  return y;
}

// Divide by the sum, to which the sink adds one logit without a value, and store 4 columns.
template <class T>
KILN_FN void finish(T* out, float* lse, const float* sink, Float4 y, Scale x, float v_scale) {
  float f = 1.0f;
  if (sink) {
    const float one_more = *sink * kLog2e, top = fmaxf(x.top, one_more);
    f = exp2_fast(x.top - top);
    x = {top, x.sum * f + exp2_fast(one_more - top)};
  }
  f = x.sum > 0 ? f * v_scale / x.sum : 0.0f;  // without a key: zero, and -infinity for lse
  store_vector(out, Words2{pack<T>(y.x * f, y.y * f), pack<T>(y.z * f, y.w * f)});
  if (lse) *lse = x.sum > 0 ? (x.top + log2_fast(x.sum)) * kLn2 : minus_infinity();
}

}  // namespace kiln
