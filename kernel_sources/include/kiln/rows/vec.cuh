// Rows of T in 16-byte accesses, with a scalar tail.
#pragma once
#include "kiln/ptx/store.cuh"

namespace kiln {

// N elements of T that move in one memory access; 16 bytes by default.
template <class T, int N = 16 / int(sizeof(T))> struct alignas(N * sizeof(T)) Vec {
  static constexpr int kSize = N;
  static_assert(N * sizeof(T) <= 16, "one memory access moves at most 16 bytes");
  T v[kSize];

  KILN_FN static Vec load(const T* p) { return load_vector<Vec>(p); }
  KILN_FN void store(T* p) const {  // to global memory
    if constexpr (sizeof(Vec) % 4 == 0) store_global(p, *this);
    else store_vector(p, *this);
  }
};

template <class T> KILN_FN bool is_vector_aligned(const T* p) {
  return reinterpret_cast<uint64_t>(p) % 16 == 0;
}

// Return how many leading elements of a row of `size` can move as vectors: all but the remainder if
// every pointer is 16-byte aligned, else none.
template <class T, class... P> KILN_FN int64_t vector_prefix(int64_t size, const P*... rows) {
  const bool aligned = (is_vector_aligned(rows) && ...);
  return aligned ? size - size % Vec<T>::kSize : 0;
}

}  // namespace kiln
