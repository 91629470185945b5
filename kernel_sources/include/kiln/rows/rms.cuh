// y[i] = s[i] / sqrt(mean(s^2) + eps) * (weight_offset + weight[i]), where s is x, or x + residual.
//
// Rounding is that of transformers. Llama: the normalised row is rounded to T before it is multiplied
// by the weight. OLMo-2, and Gemma with its offset of 1: only the product is rounded, `once`.
#pragma once
#include "kiln/ptx/fast.cuh"
#include "kiln/rows/rows.cuh"

namespace kiln {

template <class T> KILN_FN float squares(const Chunk<T>& a) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float s[Word<T>::kSize];
    Word<T>::unpack(a.word[i], s);
#pragma unroll
    for (int k = 0; k < Word<T>::kSize; ++k) sum = fma_rn(s[k], s[k], sum);
  }
  return sum;
}

template <class T>
KILN_FN Chunk<T> normalise(const Chunk<T>& a, float scale, const Chunk<T>& weight) {
  Chunk<T> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[Word<T>::kSize];
    Word<T>::unpack(a.word[i], y);
#pragma unroll
    for (int k = 0; k < Word<T>::kSize; ++k) y[k] = mul_rn(y[k], scale);
    result.word[i] = Word<T>::product(Word<T>::packed(y), weight.word[i]);
  }
  return result;
}
template <class T>
KILN_FN Chunk<T> normalise_rounding_once(const Chunk<T>& a, float scale, const Chunk<T>& weight,
                                         float offset) {
  Chunk<T> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[Word<T>::kSize], w[Word<T>::kSize];
    Word<T>::unpack(a.word[i], y);
    Word<T>::unpack(weight.word[i], w);
#pragma unroll
    for (int k = 0; k < Word<T>::kSize; ++k)
      y[k] = mul_rn(mul_rn(y[k], scale), add_rn(w[k], offset));
    result.word[i] = Word<T>::packed(y);
  }
  return result;
}

// A row with its scale: s in registers (HeldRmsRow), or to be read again (RmsRow).
template <class T, int N> struct HeldRmsRow {
  static constexpr bool kHeld = true;
  RowPart<T, N> part, weights;
  float scale, offset;
  bool once, narrow;

  KILN_FN RowPart<T, N> values() const {
    RowPart<T, N> y = part;
    if (!once) {
#pragma unroll
      for (int v = 0; v < N; ++v)
        if (v == 0 || !narrow) y.chunk[v] = normalise(part.chunk[v], scale, weights.chunk[v]);
    } else {
#pragma unroll
      for (int v = 0; v < N; ++v)
        y.chunk[v] = normalise_rounding_once(part.chunk[v], scale, weights.chunk[v], offset);
    }
    return y;
  }
};
template <class T> struct RmsRow {
  static constexpr bool kHeld = false;
  const T *s, *weight;
  float scale, offset;
  bool once;

  KILN_FN T value_at(int64_t i) const {
    const float y = mul_rn(to_float(s[i]), scale);
    T result;
    if (!once) {
      from_float(y, result);
      const uint32_t word = Word<T>::product(Word<T>::bits(result), Word<T>::bits(weight[i]));
      return Word<T>::first(word);
    }
    from_float(mul_rn(y, add_rn(to_float(weight[i]), offset)), result);
    return result;
  }
};

// 1 / sqrt(x), both operations rounded to nearest. A rare x outside the fast functions' range takes
// a branch: a power of 4 scales it into the range and changes no digit of the result.
KILN_NOINLINE float rare_inverse_root(float x) {
  const bool small = x < 1.0f;
  const float near = rcp_rn_normal(sqrt_rn_normal(mul_rn(x, small ? 0x1p64f : 0x1p-64f)));
  if (x == 0.0f) return -minus_infinity();
  return x == -minus_infinity() ? 0.0f : mul_rn(near, small ? 0x1p32f : 0x1p-32f);
}
KILN_FN float inverse_root(float x) {
  if (x > 0x1p-100f && x < 0x1p100f) return rcp_rn_normal(sqrt_rn_normal(x));
  return rare_inverse_root(x);
}

// Source of normalised rows. ADD: s = x + residual, rounded to T before its first use, replaces
// residual. inverse_d: 1 / row width; once: only the product with the weight is rounded, as it must
// be with an offset. N: chunks of a row that a thread holds, 2. With 4, half as
// many threads each do the work of two, in the same order. NARROW: skip the second chunk if no
// thread has one.
template <class T, bool ADD, int N = 2, bool NARROW = N == 2> struct RmsRows {
  static constexpr int kChunks = N;

  const T* x;
  int64_t x_stride;
  T* residual;
  int64_t residual_stride;
  const T* weight;
  float inverse_d, eps, offset;
  bool once;
  Partial<float>& partial;

  KILN_FN uint32_t misalignment() const {
    const uint32_t sums = ADD ? misalignment_of(residual, residual_stride) : 0;
    return misalignment_of(x, x_stride) | misalignment_of(weight) | sums;
  }

  KILN_FN void hint(int64_t index, uint32_t size) const {
    hint_part<T, N>(x + index * x_stride, size);
    if (ADD) hint_part<T, N>(residual + index * residual_stride, size);
    if (index == 0) hint_part<T, N>(weight, size);  // no recent kernel wrote it
  }

  struct Loaded { RowPart<T, N> x, residual, weights; };
  KILN_FN Loaded load(int64_t index, uint32_t size) const {
    Loaded part;
    using Load = Loading<T, N>;
    const T* sums = ADD ? residual + index * residual_stride : nullptr;
    const Load from_x{part.x, x + index * x_stride};
    if constexpr (ADD) load_parts(size, from_x, Load{part.residual, sums});
    else load_parts(size, from_x);
    load_parts(size, Load{part.weights, weight});  // in flight together with the row
    return part;
  }
  KILN_FN HeldRmsRow<T, N> held_row(int64_t index, uint32_t size, bool narrow,
                                    const Loaded& loaded) const {
    HeldRmsRow<T, N> row{loaded.x, loaded.weights, 0.0f, offset, once, NARROW && narrow};
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int v = 0; v < N; ++v) {
      if (v && row.narrow) continue;
      Chunk<T>& s = row.part.chunk[v];
      if (ADD) s = add(s, loaded.residual.chunk[v]);
      float& of = sum[N == 4 ? v % 2 : 0];
      of = v < (N == 4 ? 2 : 1) ? squares(s) : add_rn(of, squares(s));
      s.keep_packed();
    }
    if (ADD) store_part(row.part, residual + index * residual_stride, size);
    row.scale = scale_of(sum[0], sum[1]);
    return row;
  }
  KILN_FN RmsRow<T> row(int64_t index, int64_t size) const {
    const T* in = x + index * x_stride;
    T* sums = ADD ? residual + index * residual_stride : nullptr;
    float sum = 0.0f, other = 0.0f, of_chunk = 0.0f;
    bool odd = false;  // whether the chunk's index is odd
    for_each_element<T>(0, size, [&](int64_t i) {
      T s = in[i];
      if (ADD) from_float(add_rn(to_float(s), to_float(sums[i])), s);
      if (ADD) sums[i] = s;
      of_chunk = fma_rn(to_float(s), to_float(s), of_chunk);
      if ((i + 1) % Chunk<T>::kSize == 0 || i + 1 == size) {
        (odd ? other : sum) = add_rn(odd ? other : sum, of_chunk);
        odd = N == 4 && !odd;
        of_chunk = 0.0f;
      }
    });
    // Each thread rereads only what it stored itself, so no barrier is needed.
    return {ADD ? sums : in, weight, scale_of(sum, other), offset, once};
  }

 private:
  KILN_FN float scale_of(float sum, float other) const {
    sum = N == 4 ? double_team_sum(sum, other, partial) : team_sum(sum, partial);
    return inverse_root(add_rn(mul_rn(sum, inverse_d), eps));
  }
};

}  // namespace kiln
