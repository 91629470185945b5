// out[e, r, i] = (code - zero) * scale, in float32 and then rounded to SCALAR_T
//
// codes: [experts, all_rows, d]. out: [experts, rows, d] takes the rows from `first` on. Row s and
// input i use the scale and the zero point at [e, s >> rows_log2, g]. g is group_of[e, i] if
// group_of is given, else i / group. scales, zeros: [experts, scale_rows, scale_columns]. If zeros
// is null, `zero` is the zero point of all. All tensors are dense. d is a multiple of 8, and of 128
// for codes of 4 bits, which are in the order of jit_kernels/ops/shared/four_bits.py. out is aligned
// to 16 bytes, codes to 8. The difference is exact.
// Work split: each thread writes 8 elements of a row. Compile-time parameters
// (jit_kernels/ops/dequantize/spec.py): SCALAR_T, CODE.
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

constexpr int kElements = 8, kBits = kiln::CODE::kBits;

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

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
dequantize(SCALAR_T* out, const uint8_t* codes, const kiln::CODE::Scale* scales,
           const short* zeros, const int32_t* group_of, int64_t pieces, int32_t d,
           int32_t rows, int32_t all_rows, int32_t first, int32_t rows_log2, int32_t scale_rows,
           int32_t scale_columns, int32_t group, int32_t zero) {
  kiln::pdl_wait_then_trigger();
  const uint32_t piece = blockIdx.x * blockDim.x + threadIdx.x;
  if (piece >= pieces) return;
  const uint32_t in_row = uint32_t(d) / kElements, row = piece / in_row;
  const int begin = int(piece - row * in_row) * kElements;
  const uint32_t expert = row / uint32_t(rows);
  const int source = int(row - expert * rows) + first;
  const int64_t code_at = (int64_t(expert) * all_rows + source) * d + place_of(begin);
  const int64_t scale_at =
      (int64_t(expert) * scale_rows + (source >> rows_log2)) * scale_columns;
  const uint32_t* words = reinterpret_cast<const uint32_t*>(codes + code_at * kBits / 8);
  uint32_t word[kBits / 4];
#pragma unroll
  for (int w = 0; w < kBits / 4; ++w) word[w] = words[w];
  const bool alike = !group_of && group % kElements == 0;  // one scale for all elements
  int g = alike ? begin / group : 0;
  float scale = alike ? kiln::scale_of(scales[scale_at + g]) : 0.0f;
  int own = zeros && alike ? zeros[scale_at + g] : zero;
  float y[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    if (!alike) {
      g = group_of ? group_of[int64_t(expert) * d + begin + i] : (begin + i) / group;
      scale = kiln::scale_of(scales[scale_at + g]);
      if (zeros) own = zeros[scale_at + g];
    }
    const int bit = bit_of(i);
    const uint32_t code = word[bit / 32] >> bit % 32 & ((1u << kBits) - 1);
    y[i] = kiln::mul_rn(kiln::CODE::value(code, own), scale);
  }
  store(out + int64_t(piece) * kElements, y);
}
