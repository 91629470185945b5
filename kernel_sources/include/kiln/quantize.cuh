// Codes and scales: code = Q(y * (1 / scale)), rounded to nearest even, and saturating; y = code *
// scale. Every operation is rounded once, so that codes and scales are the same bits everywhere,
// alone and fused.
//
//   scale = largest |y| / largest code, at least 2^-126: a row of zeros gives codes of 0. A NaN or
//   an infinity among y gives a scale that is not finite: nothing that depends on it looks sound.
#pragma once
#include "kiln/ptx_fp8.cuh"
#include "kiln/rows.cuh"

namespace kiln {

constexpr int kGroup = 128;  // elements that share a scale, where it is not a row or all

template <class Q> struct Code;
template <> struct Code<e4m3> {
  static constexpr float kLargest = 448.0f;
  KILN_FN static uint32_t four(const float (&x)[4]) { return pack_e4m3(x[0], x[1], x[2], x[3]); }
};
template <> struct Code<int8_t> {
  static constexpr float kLargest = 127.0f;
  KILN_FN static uint32_t four(const float (&x)[4]) {  // a NaN gives 0
    uint32_t r = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int32_t code = to_int_rn(x[k]);
      r |= uint32_t(uint8_t(code < -128 ? -128 : code > 127 ? 127 : code)) << 8 * k;
    }
    return r;
  }
};

// The bits of a magnitude: they order as it does, with NaN above all.
KILN_FN uint32_t magnitude(float x) { return as_uint(x) & 0x7fffffff; }
template <class T> KILN_FN uint32_t largest_magnitude(const Chunk<T>& a, uint32_t largest) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x[Word<T>::kSize];
    Word<T>::unpack(a.word[i], x);
#pragma unroll
    for (int k = 0; k < Word<T>::kSize; ++k) largest = Larger::of(largest, magnitude(x[k]));
  }
  return largest;
}

template <class Q> KILN_FN float scale_of(uint32_t largest) {
  const float scale = div_rn(as_float(largest), Code<Q>::kLargest);
  return scale < 0x1p-126f ? 0x1p-126f : scale;
}

// The codes of a chunk, in order from the lowest byte of the first word.
template <class T, class Q> struct Codes {
  static constexpr int kSize = Chunk<T>::kSize;
  uint32_t word[kSize / 4];

  KILN_FN Codes(const Chunk<T>& y, float inverse) {
    constexpr int kPer = Word<T>::kSize, kWords = 4 / kPer;  // words of T to a word of codes
#pragma unroll
    for (int j = 0; j < kSize / 4; ++j) {
      float x[4];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        float some[kPer];
        Word<T>::unpack(y.word[kWords * j + i], some);
#pragma unroll
        for (int k = 0; k < kPer; ++k) x[kPer * i + k] = mul_rn(some[k], inverse);
      }
      word[j] = Code<Q>::four(x);
    }
  }
  KILN_FN void store(uint8_t* p) const { store_words(p, word); }
  KILN_FN void store_some(uint8_t* p, int64_t left) const {
    if (left >= kSize && reinterpret_cast<uint64_t>(p) % kSize == 0) return store(p);
    uint64_t rest = word[kSize / 4 - 1];
    if (kSize == 8) rest = rest << 32 | word[0];
#pragma unroll 1
    for (int k = 0; k < left && k < kSize; ++k, rest >>= 8) p[k] = uint8_t(rest);
  }
};

struct Scale { float scale, inverse; };
// One copy of the divisions' code, not one for each chunk: less to compile.
template <class Q> KILN_NOINLINE Scale scale_of_group(uint32_t largest) {
  const float scale = scale_of<Q>(largest);
  return {scale, div_rn(1.0f, scale)};
}

// The sink that stores rows as codes, with the scale of a row, of each group of kGroup elements of
// one, or the one given for all.
template <class T, class Q> struct QuantizeRows {
  uint8_t* out;
  int64_t out_stride;
  float* scales;
  int64_t scale_stride, group_stride;
  int64_t d;
  bool grouped, is_given;
  float given;
  Partial<uint32_t>& partial;

  KILN_FN uint32_t misalignment() const {  // a chunk's codes take a half or a quarter of 16 bytes
    return misalignment_of(out, out_stride) * (16 / Codes<T, Q>::kSize);
  }
  template <class Row>
  KILN_FN void write(int64_t index, int64_t size, const Row& row) const {
    uint8_t* codes = out + index * out_stride;
    if (is_given && index == 0 && threadIdx.x == 0) scales[0] = given;
    if constexpr (Row::kHeld) {
      RowPart<T> y = row.values();
      uint32_t largest = 0;
      if (!is_given && !grouped) {
#pragma unroll
        for (int v = 0; v < kChunks; ++v) largest = largest_magnitude(y.chunk[v], largest);
      }
#pragma unroll
      for (int v = 0; v < kChunks; ++v) y.chunk[v].forget_unpacked();
      const float inverse = inverse_of_row(index, size, largest);
      int i = first_chunk<T>();
#pragma unroll
      for (int v = 0; v < kChunks; ++v, i += team_span<T>()) {
        const float by = grouped ? inverse_of_group(index, size, i, y.chunk[v]) : inverse;
        if (i < size) Codes<T, Q>(y.chunk[v], by).store(codes + i);
      }
    } else {
      uint32_t largest = 0;
      float inverse = 0.0f;
#pragma unroll 1
      for (int pass = is_given || grouped ? 1 : 0; pass < 2; ++pass) {  // reduce, then store
        if (pass) inverse = inverse_of_row(index, size, largest);
        for (int64_t start = 0; start < d; start += team_span<T>()) {  // all lanes meet for a group
          const int64_t i = start + first_chunk<T>();
          const Chunk<T> y = row.values_at(i);
          if (!pass) {
            if (i < size) largest = largest_magnitude(y, largest);
          } else {
            const float by = grouped ? inverse_of_group(index, size, i, y) : inverse;
            Codes<T, Q>(y, by).store_some(codes + i, size - i);
          }
        }
      }
    }
  }

 private:
  KILN_FN float inverse_of_row(int64_t index, int64_t size, uint32_t largest) const {
    if (is_given) return div_rn(1.0f, given);
    if (grouped) return 0.0f;
    const float scale = scale_of<Q>(team_reduce<Larger>(largest, partial));
    if (size && threadIdx.x == 0) scales[index * scale_stride] = scale;
    return div_rn(1.0f, scale);
  }
  // The threads of a group are neighbours in a warp, and all take part.
  KILN_FN float inverse_of_group(int64_t index, int64_t size, int64_t i, const Chunk<T>& y) const {
    constexpr int kLanes = kGroup / Chunk<T>::kSize;
    uint32_t largest = largest_magnitude(y, 0u);
#pragma unroll
    for (int m = kLanes / 2; m; m >>= 1)
      largest = Larger::of(largest, __shfl_xor_sync(0xffffffffu, largest, m));
    const Scale group = scale_of_group<Q>(largest);
    if (threadIdx.x % kLanes == 0 && i < size)
      scales[index * scale_stride + i / kGroup * group_stride] = group.scale;
    return group.inverse;
  }
};

}  // namespace kiln
