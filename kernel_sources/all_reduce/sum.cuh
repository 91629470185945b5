// The sum over ranks of 16 bytes, and what marks a word of a slot as not sent yet.
#pragma once
#include "kiln/rows/chunk.cuh"

namespace kiln {

constexpr uint32_t kUnsent = 0xffffffff;  // a NaN, or two, that no arithmetic gives

// Replace words that look unsent by another NaN. Sums do not show it: their NaNs have one bit
// pattern, whatever NaN was added.
template <class T> KILN_FN Chunk<T> sendable(Chunk<T> v) {
  constexpr uint32_t kOther = sizeof(T) == 2 ? 0x7fff7fff : 0x7fffffff;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (v.word[i] == kUnsent) v.word[i] = kOther;
  return v;
}
KILN_FN bool is_sent(const uint32_t (&w)[4]) {
  return w[0] != kUnsent && w[1] != kUnsent && w[2] != kUnsent && w[3] != kUnsent;
}

// Whether a place is taken by a rank. Places up to half of kMost always are: a smaller world
// has a kernel of its own.
template <int kMost> KILN_FN bool has_rank(int place, int world) {
  return place <= kMost / 2 || place < world;
}

// Sums of the elements of 16 bytes, by words, in float32.
template <class T> using Sums = float[4][Word<T>::kSize];
template <class T> KILN_FN void add_to(Sums<T>& sum, const uint32_t (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[Word<T>::kSize];
    Word<T>::unpack(v[i], y);
#pragma unroll
    for (int k = 0; k < Word<T>::kSize; ++k) sum[i][k] = add_rn(sum[i][k], y[k]);
  }
}
template <class T> KILN_FN Chunk<T> rounded(Sums<T>& sum) {
  Chunk<T> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // GPUs and CPUs give NaNs of different bits; every NaN in float32 becomes this one.
    if (sizeof(T) == 4 && sum[i][0] != sum[i][0]) sum[i][0] = as_float(0x7fffffff);
    result.word[i] = Word<T>::packed(sum[i]);
  }
  return result;
}

// v[0] + v[1] + ... in float32, in the order of ranks, rounded once to T.
template <class T, int kMost>
KILN_FN Chunk<T> sum_ranks(const uint32_t (*v)[4], int world) {
  Sums<T> sum;
#pragma unroll
  for (int i = 0; i < 4; ++i) Word<T>::unpack(v[0][i], sum[i]);
#pragma unroll
  for (int rank = 1; rank < kMost; ++rank)
    if (has_rank<kMost>(rank, world)) add_to<T>(sum, v[rank]);
  return rounded<T>(sum);
}

// Move the elements of 16 bytes by one; a word of float32 is one element.
template <class T> KILN_FN void move_up(Chunk<T>& v) {
#pragma unroll
  for (int i = 3; i >= 0; --i) {
    const uint32_t below = i ? v.word[i - 1] : 0;
    v.word[i] = sizeof(T) == 2 ? v.word[i] << 16 | below >> 16 : below;
  }
}
template <class T> KILN_FN void move_down(Chunk<T>& v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t above = i < 3 ? v.word[i + 1] : 0;
    v.word[i] = sizeof(T) == 2 ? above << 16 | v.word[i] >> 16 : above;
  }
}
// Not inlined: a rare path, and otherwise a good part of the code.
template <class T> KILN_NOINLINE Chunk<T> load_elements(const T* p, int count) {
  Chunk<T> v{};
#pragma unroll 1
  while (count-- > 0) {
    move_up(v);
    v.word[0] |= Word<T>::bits(p[count]);
  }
  return v;
}
template <class T> KILN_NOINLINE void store_elements(T* p, int count, Chunk<T> v) {
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    p[k] = Word<T>::first(v.word[0]);
    move_down(v);
  }
}

// A message of n elements at any address, read and written by 16-byte vectors. The last one may be
// shorter; its other elements read as 0 and are not written. Fewer than 2^30 vectors.
template <class T, class Element = T> struct Message {
  static constexpr int kSize = Chunk<T>::kSize;
  Element* begin;
  int size;  // in vectors
  int tail;  // elements of the last vector
  bool aligned;

  KILN_FN Message(Element* begin, int64_t n)
      : begin(begin), size(int((n + kSize - 1) / kSize)), tail(int(n % kSize)),
        aligned(reinterpret_cast<uint64_t>(begin) % 16 == 0) {}

  KILN_FN Chunk<T> load(int vector) const {
    const T* p = begin + int64_t(vector) * kSize;
    const int count = length(vector);
    return aligned && count == kSize ? Chunk<T>::load(p) : load_elements(p, count);
  }
  KILN_FN void store(int vector, const Chunk<T>& v) const {
    T* p = begin + int64_t(vector) * kSize;
    const int count = length(vector);
    if (aligned && count == kSize) v.store(p);
    else store_elements(p, count, v);
  }

 private:
  KILN_FN int length(int vector) const { return tail && vector == size - 1 ? tail : kSize; }
};
template <class T> using Input = Message<T, const T>;

}  // namespace kiln
