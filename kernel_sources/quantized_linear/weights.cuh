// What a block multiplies by: tiles of codes in shared memory, and their scales and zero points.
//
// A tile is 128 outputs x 128 inputs. Eight lanes load 16 bytes each at once, four of one row and
// four of the next. Of 4-bit codes a row is 64 bytes, so these are side by side. Of 8-bit codes it
// is 128 bytes, so odd rows have their halves of 64 bytes in another order: all eight then use
// different banks.
#pragma once
#include "kiln/math/exact.cuh"
#include "kiln/math/four_bits.cuh"
#include "kiln/ptx/async.cuh"
#include "kiln/ptx/fp8.cuh"
#include "kiln/ptx/int8.cuh"

namespace kiln {

constexpr int kThreads = 128, kOutputs = 128, kChunk = 128;

// The formats of codes. unpack() turns the j-th eight codes from `from` on into four pairs of T,
// minus the zero point and divided by kRestore, which the scales are multiplied by.
struct U4 {
  using Scale = float;
  static constexpr int kBits = 4;
  static constexpr bool kZeros = true;
  template <class T> static constexpr float kRestore = kUnlift<T>;
  template <class T>
  KILN_FN static void unpack(const uint32_t* from, int j, uint32_t zero, uint32_t (&to)[4]) {
    unpack_u4<T>(from[j], zero, to);
  }
};
struct E2M1 {
  using Scale = uint8_t;  // the exponent of a power of two, plus 127
  static constexpr int kBits = 4;
  static constexpr bool kZeros = false;
  template <class T> static constexpr float kRestore = 1;
  template <class T>
  KILN_FN static void unpack(const uint32_t* from, int j, uint32_t, uint32_t (&to)[4]) {
    unpack_e2m1<T>(from[j], to);
  }
};
struct EightBits {
  using Scale = float;
  static constexpr int kBits = 8;
  static constexpr bool kZeros = false;
  template <class T> static constexpr float kRestore = 1;
};
struct E4M3 : EightBits {
  template <class T>
  KILN_FN static void unpack(const uint32_t* from, int j, uint32_t, uint32_t (&to)[4]) {
    unpack_e4m3<T>(from[2 * j], to[0], to[1]);
    unpack_e4m3<T>(from[2 * j + 1], to[2], to[3]);
  }
};
struct I8 : EightBits {
  template <class T>
  KILN_FN static void unpack(const uint32_t* from, int j, uint32_t, uint32_t (&to)[4]) {
    unpack_int8<T>(from[2 * j], to[0], to[1]);
    unpack_int8<T>(from[2 * j + 1], to[2], to[3]);
  }
};

KILN_FN float scale_of(float scale) { return scale; }
KILN_FN float scale_of(uint8_t exponent) { return power_of_two(exponent); }

// The codes of a block's outputs. Those behind the last output, or the last input, count as zeros.
template <class Format> struct Codes {
  static constexpr int kRowBytes = kChunk * Format::kBits / 8, kBytes = kOutputs * kRowBytes;
  static constexpr int kPieces = kRowBytes / 16, kRows = kThreads / kPieces;  // loaded at once

  const uint8_t* first;  // of the block's first output
  int stride;            // bytes from a row to the next, at most 2^24
  int left;              // outputs from the first on
  int row_bytes;         // of 8-bit codes; rows of 4-bit codes end with a whole tile

  KILN_FN static int place(int row, int piece) {
    return row * kRowBytes + (Format::kBits == 8 ? piece ^ row % 2 * 4 : piece) * 16;
  }
  KILN_FN void fetch(unsigned char* to, int chunk) const {
    const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    const uint8_t* from = first + (row * stride + chunk * kRowBytes + piece * 16);
    const bool ends = Format::kBits == 8 && chunk * kRowBytes + piece * 16 >= row_bytes;
    const int own = ends ? 0 : left - row;
#pragma unroll
    for (int i = 0; i < kOutputs; i += kRows, from += kRows * stride)
      copy_async_16(to + place(row + i, piece), from, i < own);
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
    uint32_t zero[kZeros ? N : 1][Format::kBits == 4 ? kOutputs : 1];
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
  int offset;          // that of this thread's output from there; outputs may share one

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
