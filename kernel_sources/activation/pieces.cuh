// out[r, i] = gated(x[r, i], x[r, d + i])      x: [rows, 2d], out: [rows, d]
// ``gated`` is an object with the functions ``element`` of two elements and ``words`` of two arrays
// of packed elements; the third array, of results, may be the first.
// A block processes blockDim.y rows and blockDim.x * kPieces pieces of each. gridDim.x covers a
// row; gridDim.y and gridDim.z together cover the rows.
#pragma once
#include "kiln/rows/gated.cuh"

namespace kiln {

constexpr int kPieces = 2;  // of gate and of up in each thread, loaded together

// Pieces of 8 bytes, not 16. That is as fast for many rows. For one row it gives more threads with
// less work each, and so a lower latency.
template <class T> struct alignas(8) Piece {
  static constexpr int kSize = 8 / sizeof(T);
  uint32_t word[2];
};

template <class T> struct Pieces { Piece<T> gate[kPieces], up[kPieces]; };

template <class T>
KILN_FN Pieces<T> load_pieces(const T* gate, uint32_t first, uint32_t size) {
  const uint32_t span = blockDim.x * Piece<T>::kSize;
  const T *g = gate + first, *u = g + size;
  Pieces<T> some{};
#pragma unroll
  for (int v = 0; v < kPieces; ++v, first += span, g += span, u += span) {
    if (first < size) some.gate[v] = load_vector<Piece<T>>(g);
    if (first < size) some.up[v] = load_vector<Piece<T>>(u);
  }
  return some;
}

template <class T, class Gated>
KILN_FN void store_pieces(const Gated& gated, T* y, Pieces<T>& some, uint32_t first,
                          uint32_t size) {
  const uint32_t span = blockDim.x * Piece<T>::kSize;
  y += first;
#pragma unroll
  for (int v = 0; v < kPieces; ++v, first += span, y += span) {
    uint32_t(&word)[2] = some.gate[v].word;
    gated.words(word, some.up[v].word, word);
    if (first < size) store_words(y, word);
  }
}

// Not inlined: with few rows, even code that is jumped over costs time.
template <class T, class Gated>
KILN_NOINLINE void run_elements(Gated gated, T* y, const T* gate, int64_t first, int64_t d) {
  const int span = blockDim.x * Piece<T>::kSize;
#pragma unroll 1
  for (int v = 0; v < kPieces; ++v, first += span)
#pragma unroll 1
    for (int64_t i = first; i < first + Piece<T>::kSize && i < d; ++i)
      from_float(gated.element(gate[i], gate[d + i]), y[i]);
}

template <class T, class Gated>
KILN_FN void gate_rows(const Gated& gated, T* out, const T* x, int64_t rows, int64_t d,
                       int64_t out_stride, int64_t x_stride) {
  const uint32_t block = blockIdx.z * gridDim.y + blockIdx.y;
  const int64_t row = int64_t(block) * blockDim.y + threadIdx.y;
  const uint32_t thread = blockIdx.x * kPieces * blockDim.x + threadIdx.x;
  const uint32_t strides = uint32_t(d) | uint32_t(x_stride) | uint32_t(out_stride);
  const uint64_t odd = reinterpret_cast<uint64_t>(x) | reinterpret_cast<uint64_t>(out) |
                       strides * sizeof(T);
  const bool whole = uint32_t(uint32_t(odd) % 8 == 0) & uint32_t(d < 1 << 30);  // one branch
  const bool mine = row < rows;
  const uint32_t first = thread * Piece<T>::kSize, size = whole && mine ? uint32_t(d) : 0;
  const T* gate = x + row * x_stride;
  Pieces<T> some = load_pieces(gate, first, size);  // in flight before the first branch
  T* y = out + row * out_stride;
  if (__builtin_expect(whole, 1)) store_pieces(gated, y, some, first, size);
  else if (mine) run_elements(gated, y, gate, int64_t(thread) * Piece<T>::kSize, d);
}

}  // namespace kiln
