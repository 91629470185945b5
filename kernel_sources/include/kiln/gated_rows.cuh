// The source of rows act(gate) * up, where a row of memory is gate and then up.
#pragma once
#include "kiln/gated.cuh"
#include "kiln/plain.cuh"

namespace kiln {

template <class T, bool HELD, float (*ACTIVATION)(float)> struct GatedRow;
template <class T, float (*ACTIVATION)(float)>
struct GatedRow<T, true, ACTIVATION> : PlainRow<T, true> {};
template <class T, float (*ACTIVATION)(float)> struct GatedRow<T, false, ACTIVATION> {
  static constexpr bool kHeld = false;
  const T *gate, *up;
  KILN_FN T value_at(int64_t i) const {
    T y;
    from_float(mul_rn(ACTIVATION(to_float(gate[i])), to_float(up[i])), y);
    return y;
  }
};

template <class T, float (*ACTIVATION)(float)> struct GatedRows {
  const T* x;
  int64_t stride, d;

  KILN_FN uint32_t misalignment() const { return misalignment_of(x, stride); }
  template <bool HELD>
  KILN_FN GatedRow<T, HELD, ACTIVATION> row(int64_t index, int64_t size) const {
    const T* gate = x + index * stride;
    GatedRow<T, HELD, ACTIVATION> row;
    if constexpr (HELD) {
      RowPart<T> up;
      load_part(row.part, gate, int(size));
      load_part(up, gate + d, int(size));
#pragma unroll
      for (int v = 0; v < kChunks; ++v)
        row.part.chunk[v] = act_and_mul<T, ACTIVATION>(row.part.chunk[v], up.chunk[v]);
    } else {
      row = {gate, gate + d};
    }
    return row;
  }
};

}  // namespace kiln
