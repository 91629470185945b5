// Source of rows act(gate) * up; a row in memory is gate, then up.
#pragma once
#include "kiln/rows/gated.cuh"
#include "quantization/plain.cuh"

namespace kiln {

template <class T, float (*ACTIVATION)(float)> struct GatedRow {  // read from memory
  static constexpr bool kHeld = false;
  const T *gate, *up;
  KILN_FN T value_at(int64_t i) const {
    T y;
    from_float(mul_rn(ACTIVATION(to_float(gate[i])), to_float(up[i])), y);
    return y;
  }
};

template <class T, float (*ACTIVATION)(float)> struct GatedRows {
  static constexpr int kChunks = 2;
  const T* x;
  int64_t stride, d;

  KILN_FN uint32_t misalignment() const { return misalignment_of(x, stride); }
  struct Loaded { RowPart<T, kChunks> gate, up; };
  KILN_FN Loaded load(int64_t index, uint32_t size) const {
    const T* gate = x + index * stride;
    Loaded both;
    using Load = Loading<T, kChunks>;
    load_parts(size, Load{both.gate, gate}, Load{both.up, gate + d});
    return both;
  }
  KILN_FN HeldRow<T, kChunks> held_row(int64_t, uint32_t, bool, const Loaded& loaded) const {
    HeldRow<T, kChunks> row;
#pragma unroll
    for (int v = 0; v < kChunks; ++v)
      row.part.chunk[v] = act_and_mul<T, ACTIVATION>(loaded.gate.chunk[v], loaded.up.chunk[v]);
    return row;
  }
  KILN_FN GatedRow<T, ACTIVATION> row(int64_t index, int64_t) const {
    const T* gate = x + index * stride;
    return {gate, gate + d};
  }
};

}  // namespace kiln
