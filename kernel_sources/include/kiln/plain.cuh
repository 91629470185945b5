// The source of rows as they are in memory.
#pragma once
#include "kiln/rows.cuh"

namespace kiln {

template <class T, bool HELD> struct PlainRow;
template <class T> struct PlainRow<T, true> {
  static constexpr bool kHeld = true;
  RowPart<T> part;
  KILN_FN RowPart<T> values() const { return part; }
};
template <class T> struct PlainRow<T, false> {
  static constexpr bool kHeld = false;
  const T* x;
  KILN_FN T value_at(int64_t i) const { return x[i]; }
};

template <class T> struct PlainRows {
  const T* x;
  int64_t stride;

  KILN_FN uint32_t misalignment() const { return misalignment_of(x, stride); }
  template <bool HELD> KILN_FN PlainRow<T, HELD> row(int64_t index, int64_t size) const {
    const T* in = x + index * stride;
    PlainRow<T, HELD> row;
    if constexpr (HELD) load_part(row.part, in, int(size));
    else row = {in};
    return row;
  }
};

}  // namespace kiln
