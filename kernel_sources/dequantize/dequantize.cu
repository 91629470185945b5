// out[e, r, i] = (code - zero) * scale, in float32 and then rounded to SCALAR_T
//
// codes: [experts, all_rows, d]. out: [experts, rows, d] takes the rows from `first` on. Row s and
// input i use the scale and the zero point at [e, s >> rows_log2, g]. g is group_of[e, i] if
// group_of is given, else i / group. scales, zeros: [experts, scale_rows, scale_columns]. If zeros
// is null, `zero` is the zero point of all. All tensors are dense. d is a multiple of 8, and of 128
// for codes of 4 bits, which are in the order of jit_kernels/ops/shared/four_bits.py. out is aligned
// to 16 bytes, codes to 8. The difference is exact.
// Work split: a piece is 8 elements of a row. Each thread writes four pieces, and loads all four
// before it writes the first. Neighbouring threads write neighbouring pieces.
// Compile-time parameters (jit_kernels/ops/dequantize/spec.py): SCALAR_T, CODE.
#include "dequantize/codes.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/chunk.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef CODE
#define CODE U4
#endif

namespace {

using Code = kiln::CODE;

constexpr uint32_t kThreads = 128;  // of a block
constexpr int kPieces = 4;          // of a thread
constexpr int kElements = 8, kBits = Code::kBits;

// Where the codes from `begin` on are in a row, counted in codes.
KILN_FN int place_of(int begin) {
  if constexpr (kBits > 4) return begin;
  const int word = begin / kElements % 16;
  return begin / 128 * 128 + (word % 4 * 4 + word / 4) * kElements;
}

// The first bit of the i-th of eight codes.
KILN_FN int bit_of(int i) { return kBits > 4 ? i * kBits : i / 2 * 4 + i % 2 * 16; }

KILN_FN void store(SCALAR_T* out, const float (&y)[kElements]) {
  using Word = kiln::Word<SCALAR_T>;
  using Chunk = kiln::Chunk<SCALAR_T>;
#pragma unroll
  for (int c = 0; c < kElements / Chunk::kSize; ++c) {
    Chunk chunk;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float some[Word::kSize];
#pragma unroll
      for (int i = 0; i < Word::kSize; ++i) some[i] = y[c * Chunk::kSize + w * Word::kSize + i];
      chunk.word[w] = Word::packed(some);
    }
    chunk.store(out + c * Chunk::kSize);
  }
}

struct Weights {
  const uint8_t* codes;
  const Code::Scale* scales;
  const short* zeros;
  const int32_t* group_of;
  int32_t d, rows, all_rows, first, rows_log2, scale_rows, scale_columns, group, group_log2, zero;

  KILN_FN int group_at(int i) const { return group_log2 < 0 ? i / group : i >> group_log2; }
};

// Where a piece is: elements 8 * column to 8 * column + 7 of a row of `out`. The pointers are to
// what belongs to that row.
struct Place {
  const uint8_t* codes;
  const Code::Scale* scales;
  const short* zeros;
  const int32_t* group_of;
  uint32_t row, column;

  KILN_FN Place(const Weights& w, uint32_t piece) {
    const uint32_t in_row = uint32_t(w.d) / kElements;
    row = piece / in_row;
    column = piece - row * in_row;
    find(w);
  }

  KILN_FN void advance(const Weights& w) {
    const uint32_t in_row = uint32_t(w.d) / kElements;
    column += kThreads;
    if (column < in_row) return;
    for (; column >= in_row; column -= in_row) ++row;
    find(w);
  }

  KILN_FN void find(const Weights& w) {
    const int64_t expert = row / uint32_t(w.rows);
    const int source = int(row - uint32_t(expert) * uint32_t(w.rows)) + w.first;
    codes = w.codes + (expert * w.all_rows + source) * (int64_t(w.d) * kBits / 8);
    const int64_t scale = (expert * w.scale_rows + (source >> w.rows_log2)) * w.scale_columns;
    scales = w.scales + scale;
    zeros = w.zeros ? w.zeros + scale : nullptr;
    group_of = w.group_of ? w.group_of + expert * w.d : nullptr;
  }
};

struct Piece {
  uint32_t word[kBits / 4];
  float scale, origin;

  KILN_FN void load(const Place& at) {
    const int begin = place_of(int(at.column) * kElements);
    const uint32_t* words = reinterpret_cast<const uint32_t*>(at.codes + begin * kBits / 8);
#pragma unroll
    for (int i = 0; i < kBits / 4; ++i) word[i] = words[i];
  }

  // The scale and the zero point of group g.
  KILN_FN void load_scale(const Weights& w, const Place& at, int g) {
    scale = kiln::scale_of(at.scales[g]);
    origin = Code::origin(at.zeros ? at.zeros[g] : w.zero);
  }

  KILN_FN float value(int i) const {
    const int bit = bit_of(i);
    const uint32_t code = word[bit / 32] >> bit % 32 & ((1u << kBits) - 1);
    return kiln::mul_rn(Code::value(code, origin), scale);
  }

  // All elements have the scale that is loaded.
  KILN_FN void write(SCALAR_T* out) const {
    float y[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) y[i] = value(i);
    store(out, y);
  }

  // Each element may have another scale.
  KILN_FN void write_mixed(const Weights& w, const Place& at, SCALAR_T* out) {
    float y[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int input = int(at.column) * kElements + i;
      load_scale(w, at, at.group_of ? at.group_of[input] : w.group_at(input));
      y[i] = value(i);
    }
    store(out, y);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
dequantize(SCALAR_T* out, const uint8_t* codes, const Code::Scale* scales, const short* zeros,
           const int32_t* group_of, int64_t pieces, int32_t d, int32_t rows, int32_t all_rows,
           int32_t first, int32_t rows_log2, int32_t scale_rows, int32_t scale_columns,
           int32_t group, int32_t group_log2, int32_t zero) {
  kiln::pdl_wait_then_trigger();
  const Weights weights{codes,     scales,     zeros,         group_of, d,    rows, all_rows, first,
                        rows_log2, scale_rows, scale_columns, group,    group_log2, zero};
  const uint32_t piece = blockIdx.x * (kPieces * kThreads) + threadIdx.x;
  if (piece >= pieces) return;
  const uint32_t left = uint32_t(pieces) - piece;
  Place at(weights, piece);
  out += int64_t(piece) * kElements;
  if (!group_of && group % kElements == 0) {
    Piece loaded[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i * kThreads >= left) break;
      loaded[i].load(at);
      loaded[i].load_scale(weights, at, weights.group_at(int(at.column) * kElements));
      at.advance(weights);
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (i * kThreads < left) loaded[i].write(out + i * kThreads * kElements);
    }
  } else {
#pragma unroll 1
    for (int i = 0; i < kPieces && i * kThreads < left; ++i) {
      Piece loaded;
      loaded.load(at);
      loaded.write_mixed(weights, at, out + i * kThreads * kElements);
      at.advance(weights);
    }
  }
}
