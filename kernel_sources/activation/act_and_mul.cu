// out[r, i] = act(x[r, i]) * x[r, d + i]      x: [rows, 2d], out: [rows, d], rows may be strided
//
// Any row count, any d, any alignment. A block takes blockDim.y rows and blockDim.x * kPieces
// pieces of each; gridDim.x covers a row, gridDim.y and gridDim.z together all rows.
// Compile-time parameters (jit_kernels/ops/activation.py): SCALAR_T, ACTIVATION.
#include "kiln/gated.cuh"
#include "kiln/ptx_launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#define ACTIVATION silu
#endif

namespace {

constexpr int kPieces = 2;  // of gate and of up that a thread takes, all loaded at once

// Pieces of 8 bytes, not 16: as fast for many rows, and for one there are more threads with less to
// execute each, which is what it waits for.
struct alignas(8) Piece {
  static constexpr int kSize = 8 / sizeof(SCALAR_T);
  uint32_t word[2];
};

KILN_FN void run_pieces(SCALAR_T* y, const SCALAR_T* gate, int first, int d) {
  const int span = blockDim.x * Piece::kSize;
  Piece g[kPieces], u[kPieces];
#pragma unroll
  for (int v = 0; v < kPieces; ++v) {
    g[v] = u[v] = Piece{};
    if (first + v * span < d) g[v] = kiln::load_vector<Piece>(gate + first + v * span);
    if (first + v * span < d) u[v] = kiln::load_vector<Piece>(gate + d + first + v * span);
  }
#pragma unroll
  for (int v = 0; v < kPieces; ++v) {
    kiln::act_and_mul<SCALAR_T, kiln::ACTIVATION>(g[v].word, u[v].word, g[v].word);
    if (first + v * span < d) kiln::store_words(y + first + v * span, g[v].word);
  }
}

KILN_FN void run_elements(SCALAR_T* y, const SCALAR_T* gate, int64_t first, int64_t d) {
  const int span = blockDim.x * Piece::kSize;
#pragma unroll 1
  for (int v = 0; v < kPieces; ++v, first += span)
#pragma unroll 1
    for (int64_t i = first; i < first + Piece::kSize && i < d; ++i) {
      const float act = kiln::ACTIVATION(kiln::to_float(gate[i]));
      kiln::from_float(kiln::mul_rn(act, kiln::to_float(gate[d + i])), y[i]);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
act_and_mul(SCALAR_T* out, const SCALAR_T* x, int64_t rows, int64_t d, int64_t out_stride,
            int64_t x_stride) {
  kiln::take_turn();
  const int64_t block = int64_t(blockIdx.z) * gridDim.y + blockIdx.y;
  const int64_t row = block * blockDim.y + threadIdx.y;
  if (row >= rows) return;
  const uint32_t strides = uint32_t(d) | uint32_t(x_stride) | uint32_t(out_stride);
  const uint64_t odd = reinterpret_cast<uint64_t>(x) | reinterpret_cast<uint64_t>(out) |
                       strides * sizeof(SCALAR_T);
  const uint32_t thread = blockIdx.x * kPieces * blockDim.x + threadIdx.x;
  const SCALAR_T* gate = x + row * x_stride;
  SCALAR_T* y = out + row * out_stride;
  if (__builtin_expect(uint32_t(odd) % 8 == 0 && d < 1 << 30, 1))
    run_pieces(y, gate, int(thread) * Piece::kSize, int(d));
  else
    run_elements(y, gate, int64_t(thread) * Piece::kSize, d);
}
