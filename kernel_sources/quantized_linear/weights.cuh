// What a block multiplies by: tiles of codes in shared memory, and their scales and zero points.
//
// A tile is 128 outputs x 128 inputs. Rows of 64 bytes follow each other, so that the 16 bytes of
// the lanes that load at once are side by side.
#pragma once
#include "kiln/math/exact.cuh"
#include "kiln/math/four_bits.cuh"
#include "kiln/ptx/async.cuh"

namespace kiln {

constexpr int kThreads = 128, kOutputs = 128, kChunk = 128;
constexpr int kRowBytes = kChunk / 2, kCodeBytes = kOutputs * kRowBytes;

// The formats of codes. unpack() turns eight codes into four pairs of T, minus the zero point and
// divided by kRestore, which the scales are multiplied by.
struct U4 {
  using Scale = float;
  static constexpr bool kZeros = true;
  template <class T> static constexpr float kRestore = kUnlift<T>;
  template <class T> KILN_FN static void unpack(uint32_t word, uint32_t zero, uint32_t (&to)[4]) {
    unpack_u4<T>(word, zero, to);
  }
};
struct E2M1 {
  using Scale = uint8_t;  // the exponent of a power of two, plus 127
  static constexpr bool kZeros = false;
  template <class T> static constexpr float kRestore = 1;
  template <class T> KILN_FN static void unpack(uint32_t word, uint32_t, uint32_t (&to)[4]) {
    unpack_e2m1<T>(word, to);
  }
};

KILN_FN float scale_of(float scale) { return scale; }
KILN_FN float scale_of(uint8_t exponent) { return power_of_two(exponent); }

// The codes of a block's outputs. Those behind the last output count as zeros.
struct Codes {
  const uint8_t* first;  // of the block's first output
  int row_bytes;         // at most 2^24
  int left;              // outputs from the first on

  KILN_FN void fetch(unsigned char* to, int chunk) const {
    const int row = threadIdx.x / 4, place = threadIdx.x % 4 * 16;
    const uint8_t* from = first + (row * row_bytes + chunk * kRowBytes + place);
#pragma unroll
    for (int i = 0; i < kOutputs; i += kThreads / 4, from += kThreads / 4 * row_bytes)
      copy_async_16(to + (row + i) * kRowBytes + place, from, i < left - row);
  }
};

template <int N> struct alignas(N * 4) Floats { float v[N]; };
template <int N> struct alignas(N) Bytes { uint8_t v[N]; };
template <int N> struct alignas(N * 2) Shorts { short v[N]; };
template <class S, int N> struct Several { using type = Floats<N>; };
template <int N> struct Several<uint8_t, N> { using type = Bytes<N>; };

// The scales and zero points of N groups of inputs, for each output of a block. Thread i has those
// of output i.
template <class T, class Format, int N> struct Factors {
  using Scale = typename Format::Scale;
  static constexpr bool kZeros = Format::kZeros;
  static constexpr int kPlain = 8;  // the zero point if none is given

  struct Place {
    float scale[N][kOutputs];
    uint32_t zero[kZeros ? N : 1][kOutputs];
  };
  struct Own {
    typename Several<Scale, N>::type scale;
    Shorts<N> zero;

    KILN_FN void store(Place& to) const {
#pragma unroll
      for (int q = 0; q < N; ++q) {
        to.scale[q][threadIdx.x] = mul_rn(scale_of(scale.v[q]), Format::template kRestore<T>);
        if constexpr (kZeros) to.zero[q][threadIdx.x] = zero_pair_of<T>(zero.v[q]);
      }
    }
  };

  const Scale* scales;
  const short* zeros;  // null: kPlain for all
  int64_t first;       // the place of the block's first output in both
  int offset;          // that of this thread's output from there

  KILN_FN Own load(int group) const {
    Own own;
    own.scale = load_vector<typename Several<Scale, N>::type>(scales + first + (offset + group));
    if constexpr (kZeros) {
#pragma unroll
      for (int q = 0; q < N; ++q) own.zero.v[q] = kPlain;
      if (zeros) own.zero = load_vector<Shorts<N>>(zeros + first + (offset + group));
    }
    return own;
  }
};

}  // namespace kiln
