// Codes and scales: code = Q(y * (1 / scale)), rounded to nearest even and saturated; y = code *
// scale. Every operation is rounded once, so the bits are the same everywhere, in fused kernels
// too.
//
//   scale = largest |y| / largest code, at least 2^-126: a row of zeros gives codes of 0. NaN or
//   infinity in y gives a scale that is not finite, so results that depend on it are visibly wrong.
#pragma once
#include "kiln/ptx/fast.cuh"
#include "kiln/ptx/fp8.cuh"
#include "kiln/rows/rows.cuh"

namespace kiln {

constexpr int kGroup = 128;  // elements that share a scale, unless a row or all do

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
  KILN_FN static uint8_t one(float x) {  // NaN gives 0
    const int32_t code = to_int_rn(x);
    return uint8_t(code < -128 ? -128 : code > 127 ? 127 : code);
  }
};

// Bits of |x|, which have the order of the magnitudes; NaN is the largest.
KILN_FN uint32_t magnitude(float x) { return as_uint(x) & 0x7fffffff; }

// Elementwise larger magnitude of two words; the sign bits are undefined.
template <class T> KILN_FN uint32_t larger_word(uint32_t a, uint32_t b) {
  return larger_pair<T>(a, b);
}
template <> KILN_FN uint32_t larger_word<float>(uint32_t a, uint32_t b) {
  return Larger::of(a & 0x7fffffff, b & 0x7fffffff);
}
template <class T> KILN_FN uint32_t larger_words(const Chunk<T>& a) {
  return larger_word<T>(larger_word<T>(a.word[0], a.word[1]),
                        larger_word<T>(a.word[2], a.word[3]));
}
// Bits of the largest magnitude in a word, converted to float.
template <class T> KILN_FN uint32_t largest_of_word(uint32_t word) {
  T element;
  element.bits = uint16_t(Larger::of(word & 0x7fff, word >> 16 & 0x7fff));
  return as_uint(to_float(element));
}
template <> KILN_FN uint32_t largest_of_word<float>(uint32_t word) { return word & 0x7fffffff; }
template <class T> KILN_FN uint32_t largest_magnitude(const Chunk<T>& a, uint32_t largest) {
  return Larger::of(largest, largest_of_word<T>(larger_words(a)));
}

struct Scale { float scale, inverse; };
// x / kLargest for x from 2^-90 to 2^90. Dividing by a constant with a known reciprocal takes three
// operations, and rounds as div_rn does.
template <class Q> KILN_FN float normal_scale(float x) {
  constexpr float kInverse = 1.0f / Code<Q>::kLargest;
  const float near = mul_rn(x, kInverse);
  return fma_rn(fma_rn(near, -Code<Q>::kLargest, x), kInverse, near);
}
// Any magnitude. A power of 2 scales it into normal_scale's range, and changes no digit of a scale
// above the smallest.
template <class Q> KILN_NOINLINE Scale rare_scale_of(uint32_t largest) {
  const float x = as_float(largest);
  if (x == -minus_infinity()) return {x, 0.0f};
  const bool small = x < 1.0f;
  const float to = small ? 0x1p64f : 0x1p-64f, back = small ? 0x1p-64f : 0x1p64f;
  const float least = mul_rn(0x1p-126f, to), scale = normal_scale<Q>(mul_rn(x, to));
  const float enough = small && scale < least ? least : scale;
  return {mul_rn(enough, back), mul_rn(rcp_rn_normal(enough), to)};
}
template <class Q> KILN_FN Scale scale_of(uint32_t largest) {
  const float x = as_float(largest);
  if (x > 0x1p-90f && x < 0x1p90f) {
    const float scale = normal_scale<Q>(x);
    return {scale, rcp_rn_normal(scale)};
  }
  return rare_scale_of<Q>(largest);
}

// Codes of a chunk, the first in the lowest byte of the first word.
template <class T, class Q> struct Codes {
  static constexpr int kSize = Chunk<T>::kSize;
  uint32_t word[kSize / 4];

  KILN_FN Codes(const Chunk<T>& y, float inverse) {
    constexpr int kPer = Word<T>::kSize, kWords = 4 / kPer;  // words of T for a word of codes
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

// The largest magnitude of a group of kGroup elements, from the lanes' maxima of their N chunks. A
// lane gets the result for its chunk chunk_of_lane(); all lanes of a warp take part. With two
// magnitudes in a word, two chunks are reduced together. With four chunks, after the first step
// each half of a group's lanes reduces two of them.
template <int N> KILN_FN int chunk_of_lane() {
  return (N == 4 ? threadIdx.x / 8 % 2 * 2 : 0) + threadIdx.x % 2;
}
template <class T> KILN_FN uint32_t larger_halves(uint32_t a, uint32_t b) {  // low: a, high: b
  return larger_word<T>((a & 0xffff) | b << 16, a >> 16 | (b & 0xffff0000));
}
template <class T, int N> KILN_FN uint32_t largest_of_group(const uint32_t (&largest)[N]) {
  if constexpr (sizeof(T) == 4) {
    const uint32_t a = warp_largest(largest[0]), b = warp_largest(largest[1]);
    return chunk_of_lane<N>() ? b : a;
  } else {
    uint32_t word = larger_halves<T>(largest[0], largest[1]), other = word;
    if constexpr (N == 4) {
      other = larger_halves<T>(largest[2], largest[3]);
      const bool upper = threadIdx.x / 8 % 2;
      const uint32_t mine = upper ? other : word;
      other = upper ? word : other;
      word = mine;
    }
    word = larger_word<T>(word, __shfl_xor_sync(0xffffffffu, other, 8));
#pragma unroll
    for (int m = 4; m; m >>= 1)
      word = larger_word<T>(word, __shfl_xor_sync(0xffffffffu, word, m));
    return largest_of_word<T>(threadIdx.x % 2 ? word >> 16 : word & 0xffff);
  }
}

// The largest of a group or team, on the general path. Not inlined: it would take registers.
template <uint32_t LANES>
KILN_NOINLINE uint32_t general_largest(uint32_t largest, bool grouped,
                                       Partial<uint32_t>& partial) {
  if (!grouped) return team_largest(largest, partial);
#pragma unroll 1
  for (int m = LANES / 2; m; m >>= 1)
    largest = Larger::of(largest, __shfl_xor_sync(0xffffffffu, largest, m));
  return largest;
}

// A sink that stores rows as codes, with a scale for each row, for each group of kGroup elements,
// or one given for all.
template <class T, class Q> struct QuantizeRows {
  uint8_t* out;
  int64_t out_stride;
  float* scales;
  int64_t scale_stride, group_stride;
  int64_t d;
  bool grouped, is_given;
  float given;
  Partial<uint32_t>& partial;

  KILN_FN uint32_t misalignment() const {  // codes of a chunk take 8 or 4 bytes
    return misalignment_of(out, out_stride) * (16 / Codes<T, Q>::kSize);
  }
  template <class Row>
  KILN_FN void write(int64_t index, int64_t size, const Row& row) const {
    uint8_t* codes = out + index * out_stride;
    if constexpr (Row::kHeld) {
      const auto y = row.values();
      constexpr int N = sizeof(y) / sizeof(y.chunk[0]);
      uint32_t largest[N];
#pragma unroll
      for (int v = 0; v < N; ++v) largest[v] = larger_words(y.chunk[v]);
      const uint32_t i = first_chunk<T>();
      float inverse[N];
      if (grouped) {
        const Scale one = scale_of<Q>(largest_of_group<T>(largest));
        const uint32_t at = i + chunk_of_lane<N>() * team_span<T>();
        if (threadIdx.x % kLanes % 8 < 2 && threadIdx.x % kLanes < 4 * N && at < size)
          scales[index * scale_stride + at / kGroup * group_stride] = one.scale;
#pragma unroll
        for (int v = 0; v < N; ++v)
          inverse[v] = __shfl_sync(0xffffffffu, one.inverse, v / 2 * 8 + v % 2, kLanes);
      } else {
        const float all = inverse_of_row(index, size, largest);
#pragma unroll
        for (int v = 0; v < N; ++v) inverse[v] = all;
      }
      uint32_t at = i;
      codes += i;
#pragma unroll
      for (int v = 0; v < N; ++v, at += team_span<T>(), codes += team_span<T>()) {
        const Codes<T, Q> some(y.chunk[v], inverse[v]);  // computed even if not stored: no branch
        if (at < size) some.store(codes);
      }
    } else {
      float* to = scales + index * scale_stride;
      if (is_given && index == 0 && threadIdx.x == 0) *to = given;
      // Process the whole row, or with groups what the team covers in a step: first find the
      // largest magnitudes, then store the codes.
      const int64_t step = grouped ? team_span<T>() : d;
      uint32_t found = is_given ? as_uint(rcp_rn(given)) : 0;  // the largest, then 1 / scale
#pragma unroll 1
      for (int64_t start = 0; start < d; start += step, found = 0) {
        const int64_t end = size < start + step ? size : start + step;
#pragma unroll 1
        for (uint32_t pass = is_given; pass < 2; ++pass) {
          if (pass && !is_given) found = as_uint(general_inverse(to, start, end, found));
          for_each_element<T>(start, end, [&](int64_t i) {
            const float y = to_float(row.value_at(i));
            if (pass) codes[i] = Code<Q>::one(mul_rn(y, as_float(found)));
            else found = Larger::of(found, magnitude(y));
          });
        }
      }
    }
  }

 private:
  static constexpr uint32_t kLanes = kGroup / Chunk<T>::kSize;  // lanes that share a group

  template <int N>
  KILN_FN float inverse_of_row(int64_t index, int64_t size, const uint32_t (&largest)[N]) const {
    if (is_given) {
      if (index == 0 && threadIdx.x == 0) scales[0] = given;
      return rcp_rn(given);
    }
    uint32_t all = largest[0];
#pragma unroll
    for (int v = 1; v < N; ++v) all = larger_word<T>(all, largest[v]);
    const Scale one = scale_of<Q>(team_largest(largest_of_word<T>(all), partial));
    if (size && threadIdx.x == 0) scales[index * scale_stride] = one.scale;
    return one.inverse;
  }
  KILN_FN float general_inverse(float* to, int64_t start, int64_t end, uint32_t largest) const {
    largest = general_largest<kLanes>(largest, grouped, partial);
    const Scale one = rare_scale_of<Q>(largest);
    const int64_t i = start + first_chunk<T>();
    const bool first = grouped ? i % kGroup == 0 : i == 0;
    if (first && i < end) to[i / kGroup * group_stride] = one.scale;
    return one.inverse;
  }
};

}  // namespace kiln
