// A row of logits with its mask and edits, as the passes of the sampler read it.
#pragma once
#include "sampling/draw.cuh"
#include "kiln/rows/chunk.cuh"
#include "kiln/rows/vec.cuh"

namespace kiln {

constexpr int kUnit = 16;  // tokens that are read and summed together, for every type

// A request's changes to single logits, one at most for each token: list elements first .. last -
// 1.
struct Edits {
  const int *tokens, *counts;  // counts: in the output; 0: only in the prompt; < 0: in neither
  const float* biases;
  int first, last;
  float repetition, frequency, presence;
};

// Apply the bias, then the repetition, frequency and presence penalties: vLLM's order. Returns -inf
// if the mask forbids the token.
KILN_NOINLINE float apply(const Edits& edits, int e, float x, const uint32_t* allowed) {
  const int count = edits.counts[e], token = edits.tokens[e];
  x = add_rn(x, edits.biases[e]);
  if (count >= 0) x = x > 0.0f ? div_rn(x, edits.repetition) : mul_rn(x, edits.repetition);
  if (count > 0) x = sub_rn(sub_rn(x, mul_rn(edits.frequency, float(count))), edits.presence);
  const bool out = allowed != nullptr && !(allowed[token / 32] >> token % 32 & 1);
  return out ? minus_infinity() : x;
}

// A unit as stored in memory, packed.
template <class T> struct Unit {
  Chunk<T> part[kUnit / Chunk<T>::kSize];

  KILN_FN static Unit load(const T* p) {
    Unit unit;
#pragma unroll
    for (int i = 0; i < kUnit / Chunk<T>::kSize; ++i)
      unit.part[i] = Chunk<T>::load(p + i * Chunk<T>::kSize);
    return unit;
  }
  KILN_FN void unpack(float (&x)[kUnit]) const {
#pragma unroll
    for (int w = 0; w < kUnit / Word<T>::kSize; ++w) {
      float y[Word<T>::kSize];
      Word<T>::unpack(part[w / 4].word[w % 4], y);
#pragma unroll
      for (int k = 0; k < Word<T>::kSize; ++k) x[w * Word<T>::kSize + k] = y[k];
    }
  }
};

// Set the logits whose bit is set to -inf.
KILN_FN void hide(float (&x)[kUnit], uint32_t hidden) {
#pragma unroll
  for (int k = 0; k < kUnit; ++k) x[k] = hidden >> k & 1 ? minus_infinity() : x[k];
}

struct Logits16 {
  float x[kUnit];
};

// Load a unit of which `size` elements exist. The others, and those with a bit in `hidden`, are
// -inf.
template <class T>
KILN_NOINLINE Logits16 fetch(const T* p, int size, bool whole, uint32_t hidden) {
  Logits16 unit;
  if (whole) {
    Unit<T>::load(p).unpack(unit.x);
  } else {
#pragma unroll
    for (int k = 0; k < kUnit; ++k) unit.x[k] = k < size ? to_float(p[k]) : minus_infinity();
  }
  hide(unit.x, hidden);
  return unit;
}

// Low bits of a key that carry no information about a logit of this type.
template <class T> constexpr int kFreeBits = 0;
template <> constexpr int kFreeBits<bf16> = 16;

KILN_FN float largest(const float (&x)[kUnit]) {
  float m[4];
#pragma unroll
  for (int k = 0; k < 4; ++k)
    m[k] = fmaxf(fmaxf(x[k], x[k + 4]), fmaxf(x[k + 8], x[k + 12]));
  return fmaxf(fmaxf(m[0], m[1]), fmaxf(m[2], m[3]));
}

// One bit for each logit of a unit: has(logit).
template <class P> KILN_FN uint32_t chosen(const float (&x)[kUnit], P has) {
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < kUnit; ++k) bits |= uint32_t(has(x[k])) << k;
  return bits;
}

KILN_FN float select(bool second, float a, float b) { return second ? b : a; }
// x[k] by selects: an array that is indexed would be in local memory.
template <int N> KILN_FN float pick(const float (&x)[N], int k) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    float y[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) y[i] = select(k & N / 2, x[i], x[i + N / 2]);
    return pick(y, k);
  }
}
// Index of the lowest set bit.
KILN_FN int first_of(uint32_t bits) { return 31 - __clz(int(bits & (0 - bits))); }

template <class T> struct Row {
  const T* data;
  int vocab;
  bool aligned;
  const uint32_t* allowed;  // one bit per token; null: all are allowed
  const uint8_t* hidden;    // in shared memory, one bit per token: fetch returns -inf; null: none
  Edits edits;              // their tokens are hidden

  KILN_FN bool has_edits() const { return edits.first != edits.last; }
  KILN_FN int num_units() const { return (vocab + kUnit - 1) / kUnit; }
  KILN_FN int num_whole_units() const { return aligned ? vocab / kUnit : 0; }
  KILN_FN float at(int token) const { return to_float(data[token]); }
  KILN_FN float masked_at(int token) const {  // as fetch returns it
    return hides(token / kUnit) >> token % kUnit & 1 ? minus_infinity() : at(token);
  }

  // Hidden tokens of a unit, one bit each. The bits start where dynamic shared memory does.
  KILN_FN uint32_t hides(int u) const {
    return hidden == nullptr ? 0 : reinterpret_cast<const uint16_t*>(dynamic_shared())[u];
  }

  KILN_FN void fetch(int u, float (&x)[kUnit]) const {
    const T* p = data + u * kUnit;
    const Logits16 unit = kiln::fetch(p, vocab - u * kUnit, u < num_whole_units(), hides(u));
#pragma unroll
    for (int k = 0; k < kUnit; ++k) x[k] = unit.x[k];
  }

  // Call f(token, logit) for the edited tokens, divided among the block's threads.
  template <class F> KILN_FN void each_edit(F f) const {
#pragma unroll 1
    for (int e = edits.first + int(threadIdx.x); e < edits.last; e += blockDim.x)
      f(edits.tokens[e], edited(e));
  }

  KILN_FN float edited(int e) const { return apply(edits, e, at(edits.tokens[e]), allowed); }
};

}  // namespace kiln
