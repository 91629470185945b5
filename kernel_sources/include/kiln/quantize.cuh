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
  KILN_FN static uint8_t one(float x) {
    e4m3 code;
    from_float(x, code);
    return code.bits;
  }
};
template <> struct Code<int8_t> {
  static constexpr float kLargest = 127.0f;
  KILN_FN static uint32_t four(const float (&x)[4]) {
    uint32_t r = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) r |= uint32_t(one(x[k])) << 8 * k;
    return r;
  }
  KILN_FN static uint8_t one(float x) {  // a NaN gives 0
    const int32_t code = to_int_rn(x);
    return uint8_t(code < -128 ? -128 : code > 127 ? 127 : code);
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
};

struct Scale { float scale, inverse; };
// The scale of a group from the largest magnitude of each of its threads, which are neighbours in a
// warp, and all take part. One copy of the code, not one for each chunk: less to compile.
template <class Q, int LANES> KILN_NOINLINE Scale scale_of_group(uint32_t largest) {
#pragma unroll
  for (int m = LANES / 2; m; m >>= 1)
    largest = Larger::of(largest, __shfl_xor_sync(0xffffffffu, largest, m));
  const float scale = scale_of<Q>(largest);
  return {scale, rcp_rn(scale)};
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
      uint32_t largest[kChunks] = {};
      if (!is_given) {
#pragma unroll
        for (int v = 0; v < kChunks; ++v) largest[v] = largest_magnitude(y.chunk[v], 0u);
      }
#pragma unroll
      for (int v = 0; v < kChunks; ++v) y.chunk[v].forget_unpacked();
      float inverse = 0.0f;
      if (!grouped) inverse = inverse_of_row(index, size, Larger::of(largest[0], largest[1]));
      int i = first_chunk<T>();
#pragma unroll
      for (int v = 0; v < kChunks; ++v, i += team_span<T>()) {
        if (grouped) inverse = inverse_of_group(index, size, i, largest[v]);
        if (i < size) Codes<T, Q>(y.chunk[v], inverse).store(codes + i);
      }
    } else {
      // Scales are found for the whole row, or for as much as the team takes in a step: first the
      // largest magnitudes, then the codes.
      const int64_t step = grouped ? team_span<T>() : d;
#pragma unroll 1
      for (int64_t start = 0; start < d; start += step) {
        const int64_t end = size < start + step ? size : start + step;
        uint32_t largest = 0;
        float inverse = 0.0f;
#pragma unroll 1
        for (int pass = is_given ? 1 : 0; pass < 2; ++pass) {
          if (pass && is_given) {
            inverse = rcp_rn(given);
          } else if (pass) {
            if (!grouped) largest = team_reduce_rolled<Larger>(largest, partial);
            inverse = inverse_of_group(index, size, start + first_chunk<T>(), largest);
          }
          for_each_element<T>(start, end, [&](int64_t i) {
            const float y = to_float(row.value_at(i));
            if (pass) codes[i] = Code<Q>::one(mul_rn(y, inverse));
            else largest = Larger::of(largest, magnitude(y));
          });
        }
      }
    }
  }

 private:
  static constexpr int kLanes = kGroup / Chunk<T>::kSize;  // that share a group

  KILN_FN float inverse_of_row(int64_t index, int64_t size, uint32_t largest) const {
    float scale = given;
    if (!is_given) {
      scale = scale_of<Q>(team_reduce<Larger>(largest, partial));
      if (size && threadIdx.x == 0) scales[index * scale_stride] = scale;
    }
    return rcp_rn(scale);
  }
  template <class I>
  KILN_FN float inverse_of_group(int64_t index, int64_t size, I i, uint32_t largest) const {
    const Scale group = scale_of_group<Q, kLanes>(largest);
    const bool first = grouped ? threadIdx.x % kLanes == 0 : threadIdx.x == 0;
    if (first && i < size)
      scales[index * scale_stride + (grouped ? i / kGroup * group_stride : 0)] = group.scale;
    return group.inverse;
  }
};

}  // namespace kiln
