// A row of logits under a mask and edits: what the passes of the sampler read.
#pragma once
#include "kiln/draw.cuh"
#include "kiln/vec.cuh"

namespace kiln {

constexpr int kUnit = 8;  // tokens that are read and summed together, whatever their type

// What a request changes about single tokens, each at most once: `first` .. `last - 1` of the lists.
struct Edits {
  const int *tokens, *counts;  // counts: in the output; 0 in the prompt alone, below in neither
  const float* biases;
  int first, last;
  float repetition, frequency, presence;
};

// A bias first, then the repetition, frequency and presence penalties: vLLM's order.
KILN_NOINLINE float apply(const Edits& edits, int e, float x) {
  const int count = edits.counts[e];
  x = add_rn(x, edits.biases[e]);
  if (count >= 0) x = x > 0.0f ? div_rn(x, edits.repetition) : mul_rn(x, edits.repetition);
  if (count > 0) x = sub_rn(sub_rn(x, mul_rn(edits.frequency, float(count))), edits.presence);
  return x;
}

template <class T> struct Chunk {  // one unit as it lies in memory
  Vec<T> part[kUnit / Vec<T>::kSize];
  KILN_FN void unpack(float (&x)[kUnit]) const {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) x[k] = to_float(part[k / Vec<T>::kSize].v[k % Vec<T>::kSize]);
  }
};

// A unit of which only `size` elements may be there, one by one.
template <class T> KILN_NOINLINE Chunk<T> load_singly(const T* p, int size) {
  Chunk<T> c;
#pragma unroll
  for (int k = 0; k < kUnit; ++k) {
    T& x = c.part[k / Vec<T>::kSize].v[k % Vec<T>::kSize];
    if (k < size) x = p[k];
    else from_float(minus_infinity(), x);
  }
  return c;
}

KILN_FN float largest(const float (&x)[kUnit]) {
  float m = x[0];
#pragma unroll
  for (int k = 1; k < kUnit; ++k) m = x[k] > m ? x[k] : m;
  return m;
}

template <class T> struct Row {
  const T* data;
  int vocab;
  bool aligned;
  const uint32_t* allowed;  // a bit a token, or null: all are
  const uint8_t* hidden;    // shared: a bit a token that each_unit shows as -inf; null: none
  Edits edits;              // of tokens that are hidden

  KILN_FN int num_units() const { return (vocab + kUnit - 1) / kUnit; }
  KILN_FN int num_whole_units() const { return aligned ? vocab / kUnit : 0; }
  KILN_FN float at(int token) const { return to_float(data[token]); }

  KILN_FN Chunk<T> load(int u) const {
    Chunk<T> c;
#pragma unroll
    for (int i = 0; i < kUnit / Vec<T>::kSize; ++i)
      c.part[i] = Vec<T>::load(data + u * kUnit + i * Vec<T>::kSize);
    return c;
  }
  // A unit that may be misaligned or cut short: -inf past the end.
  KILN_FN Chunk<T> fetch(int u) const {
    return u < num_whole_units() ? load(u) : load_singly(data + u * kUnit, vocab - u * kUnit);
  }
  KILN_FN void hide(int u, float (&x)[kUnit]) const {
    const uint32_t out = hidden == nullptr ? 0 : hidden[u];
    if (out == 0) return;
#pragma unroll
    for (int k = 0; k < kUnit; ++k) x[k] = out >> k & 1 ? minus_infinity() : x[k];
  }

  // f(unit, its logits): every unit of the row, over the block's threads.
  template <class F> KILN_FN void each_unit(F f) const {
    const int units = num_units();
    int u = threadIdx.x;
    Chunk<T> next;
    if (u < units) next = fetch(u);
#pragma unroll 1
    for (; u < units; u += blockDim.x) {
      float x[kUnit];
      next.unpack(x);
      if (u + int(blockDim.x) < units) next = fetch(u + blockDim.x);  // in flight while f works
      hide(u, x);
      f(u, x);
    }
  }
  // f(token, logit): the tokens of one unit, read again. For the rare case.
  template <class F> KILN_FN void each_of(int u, F f) const {
    const uint32_t out = hidden == nullptr ? 0 : hidden[u];
#pragma unroll 1
    for (int k = 0; k < kUnit && u * kUnit + k < vocab; ++k)
      f(u * kUnit + k, out >> k & 1 ? minus_infinity() : at(u * kUnit + k));
  }
  // f(token, logit): every token, edited ones too, over the block's threads. Compact, not fast.
  template <class F> KILN_FN void each_token(F f) const {
    const int edited_tokens = edits.last - edits.first;
#pragma unroll 1
    for (int i = threadIdx.x; i < vocab + edited_tokens; i += blockDim.x) {
      const int e = edits.first + i - vocab, token = i < vocab ? i : edits.tokens[e];
      const bool out = i < vocab && hidden != nullptr && hidden[i / 8] >> i % 8 & 1;
      f(token, out ? minus_infinity() : i < vocab ? at(i) : edited(e));
    }
  }
  // f(token, logit): the edited tokens, over the block's threads.
  template <class F> KILN_FN void each_edit(F f) const {
#pragma unroll 1
    for (int e = edits.first + int(threadIdx.x); e < edits.last; e += blockDim.x)
      f(edits.tokens[e], edited(e));
  }

  KILN_FN float edited(int e) const {
    const int token = edits.tokens[e];
    if (allowed != nullptr && !(allowed[token / 32] >> token % 32 & 1)) return minus_infinity();
    return apply(edits, e, at(token));
  }
};

}  // namespace kiln
