// y[i] = s[i] / sqrt(mean(s^2) + eps) * (weight_offset + weight[i]), where s is x, or x + residual.
//
// Rounded as transformers does. Llama's form, weight_offset 0: the normalised row is rounded to T
// before the weight multiplies it. Gemma's, weight_offset 1: it is not.
#pragma once
#include "kiln/rows.cuh"

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
KILN_FN Chunk<T> normalise(const Chunk<T>& a, float scale, const Chunk<T>& weight, float offset,
                           bool llama) {
  Chunk<T> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[Word<T>::kSize], w[Word<T>::kSize];
    Word<T>::unpack(a.word[i], y);
#pragma unroll
    for (int k = 0; k < Word<T>::kSize; ++k) y[k] = mul_rn(y[k], scale);
    if (llama) {
      result.word[i] = Word<T>::product(Word<T>::packed(y), weight.word[i]);
    } else {
      Word<T>::unpack(weight.word[i], w);
#pragma unroll
      for (int k = 0; k < Word<T>::kSize; ++k) y[k] = mul_rn(y[k], add_rn(w[k], offset));
      result.word[i] = Word<T>::packed(y);
    }
  }
  return result;
}

// One row that has been reduced: s in registers, or still in memory.
template <class T, bool HELD> struct RmsRow;
template <class T> struct RmsRow<T, true> {
  static constexpr bool kHeld = true;
  RowPart<T> part, weights;
  float scale, offset;

  KILN_FN RowPart<T> values() const {
    RowPart<T> y;
    if (__builtin_expect(offset == 0.0f, 1)) {
#pragma unroll
      for (int v = 0; v < kChunks; ++v)
        y.chunk[v] = normalise(part.chunk[v], scale, weights.chunk[v], 0.0f, true);
    } else {
#pragma unroll
      for (int v = 0; v < kChunks; ++v)
        y.chunk[v] = normalise(part.chunk[v], scale, weights.chunk[v], offset, false);
    }
    return y;
  }
};
template <class T> struct RmsRow<T, false> {
  static constexpr bool kHeld = false;
  const T *s, *weight;
  float scale, offset;

  KILN_FN T value_at(int64_t i) const {
    const float y = mul_rn(to_float(s[i]), scale);
    T result;
    if (offset == 0.0f) {
      from_float(y, result);
      const uint32_t word = Word<T>::product(Word<T>::bits(result), Word<T>::bits(weight[i]));
      return Word<T>::first(word);
    }
    from_float(mul_rn(y, add_rn(to_float(weight[i]), offset)), result);
    return result;
  }
};

// The source of normalised rows. ADD: s = x + residual is rounded to T before anything reads it,
// and left in residual. inverse_d: 1 / the width of a row.
template <class T, bool ADD> struct RmsRows {
  const T* x;
  int64_t x_stride;
  T* residual;
  int64_t residual_stride;
  const T* weight;
  float inverse_d, eps, offset;
  Partial<float>& partial;

  KILN_FN uint32_t misalignment() const {
    const uint32_t sums = ADD ? misalignment_of(residual, residual_stride) : 0;
    return misalignment_of(x, x_stride) | misalignment_of(weight) | sums;
  }
  template <bool HELD>
  KILN_FN RmsRow<T, HELD> row(int64_t index, int64_t size) const {
    const T* in = x + index * x_stride;
    T* sums = ADD ? residual + index * residual_stride : nullptr;
    RmsRow<T, HELD> row;
    float sum = 0.0f;
    if constexpr (HELD) {
      RowPart<T> more;
      load_part(row.part, in, int(size));
      if (ADD) load_part(more, sums, int(size));
      load_part(row.weights, weight, int(size));  // in flight with the row, not after its sum
#pragma unroll
      for (int v = 0; v < kChunks; ++v) {
        if (ADD) row.part.chunk[v] = add(row.part.chunk[v], more.chunk[v]);
        sum = add_rn(sum, squares(row.part.chunk[v]));
        row.part.chunk[v].forget_unpacked();
      }
      if (ADD) store_part(row.part, sums, int(size));
    } else {
      float of_chunk = 0.0f;
      for_each_element<T>(0, size, [&](int64_t i) {
        T s = in[i];
        if (ADD) from_float(add_rn(to_float(s), to_float(sums[i])), s);
        if (ADD) sums[i] = s;
        of_chunk = fma_rn(to_float(s), to_float(s), of_chunk);
        if ((i + 1) % Chunk<T>::kSize == 0) {
          sum = add_rn(sum, of_chunk);
          of_chunk = 0.0f;
        }
      });
      sum = add_rn(sum, of_chunk);
      row.s = ADD ? sums : in;  // each thread reads back only what it stored itself
      row.weight = weight;
    }
    sum = HELD ? team_reduce<Add>(sum, partial) : team_reduce_rolled<Add>(sum, partial);
    const float mean = mul_rn(sum, inverse_d);
    row.scale = rcp_rn(sqrt_rn(add_rn(mean, eps)));
    row.offset = offset;
    return row;
  }
};

}  // namespace kiln
