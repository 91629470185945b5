// Source of rows that are used as they are in memory.
#pragma once
#include "kiln/rows/rows.cuh"

namespace kiln {

template <class T, int N> struct HeldRow {
  static constexpr bool kHeld = true;
  RowPart<T, N> part;
  KILN_FN RowPart<T, N> values() const { return part; }
};
template <class T> struct PlainRow {  // read from memory
  static constexpr bool kHeld = false;
  const T* x;
  KILN_FN T value_at(int64_t i) const { return x[i]; }
};

template <class T> struct PlainRows {
  static constexpr int kChunks = 2;
  const T* x;
  int64_t stride;

  KILN_FN uint32_t misalignment() const { return misalignment_of(x, stride); }
  using Loaded = RowPart<T, kChunks>;
  KILN_FN Loaded load(int64_t index, uint32_t size) const {
    Loaded part;
    load_parts(size, Loading<T, kChunks>{part, x + index * stride});
    return part;
  }
  KILN_FN HeldRow<T, kChunks> held_row(int64_t, uint32_t, bool, const Loaded& loaded) const {
    return {loaded};
  }
  KILN_FN PlainRow<T> row(int64_t index, int64_t) const { return {x + index * stride}; }
};

}  // namespace kiln
