// out[r, i] = act(x[r, i]) * x[r, d + i]      x: [rows, 2d], out: [rows, d], rows may be strided
// Any number of rows, any d, any alignment. A block processes blockDim.y rows and blockDim.x *
// kPieces pieces of each. gridDim.x covers a row; gridDim.y and gridDim.z together cover the rows.
// Compile-time parameters (jit_kernels/ops/activation/spec.py): SCALAR_T, ACTIVATION.
#include "kiln/rows/gated.cuh"
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#define ACTIVATION silu
#endif

namespace {

constexpr int kPieces = 2;  // of gate and of up in each thread, loaded together

// Pieces of 8 bytes, not 16. That is as fast for many rows. For one row it gives more threads with
// less work each, and so a lower latency.
struct alignas(8) Piece {
  static constexpr int kSize = 8 / sizeof(SCALAR_T);
  uint32_t word[2];
};

struct Pieces { Piece gate[kPieces], up[kPieces]; };

KILN_FN Pieces load_pieces(const SCALAR_T* gate, uint32_t first, uint32_t size) {
  const uint32_t span = blockDim.x * Piece::kSize;
  const SCALAR_T *g = gate + first, *u = g + size;
  Pieces some{};
#pragma unroll
  for (int v = 0; v < kPieces; ++v, first += span, g += span, u += span) {
    if (first < size) some.gate[v] = kiln::load_vector<Piece>(g);
    if (first < size) some.up[v] = kiln::load_vector<Piece>(u);
  }
  return some;
}

KILN_FN void store_pieces(SCALAR_T* y, Pieces& some, uint32_t first, uint32_t size) {
  const uint32_t span = blockDim.x * Piece::kSize;
  y += first;
#pragma unroll
  for (int v = 0; v < kPieces; ++v, first += span, y += span) {
    uint32_t(&word)[2] = some.gate[v].word;
    kiln::act_and_mul<SCALAR_T, kiln::ACTIVATION>(word, some.up[v].word, word);
    if (first < size) kiln::store_words(y, word);
  }
}

// Not inlined: with few rows, even code that is jumped over costs time.
KILN_NOINLINE void run_elements(SCALAR_T* y, const SCALAR_T* gate, int64_t first, int64_t d) {
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
  kiln::pdl_wait_then_trigger();
  const uint32_t block = blockIdx.z * gridDim.y + blockIdx.y;
  const int64_t row = int64_t(block) * blockDim.y + threadIdx.y;
  const uint32_t thread = blockIdx.x * kPieces * blockDim.x + threadIdx.x;
  const uint32_t strides = uint32_t(d) | uint32_t(x_stride) | uint32_t(out_stride);
  const uint64_t odd = reinterpret_cast<uint64_t>(x) | reinterpret_cast<uint64_t>(out) |
                       strides * sizeof(SCALAR_T);
  const bool whole = uint32_t(uint32_t(odd) % 8 == 0) & uint32_t(d < 1 << 30);  // one branch
  const bool mine = row < rows;
  const uint32_t first = thread * Piece::kSize, size = whole && mine ? uint32_t(d) : 0;
  const SCALAR_T* gate = x + row * x_stride;
  Pieces some = load_pieces(gate, first, size);  // in flight before the first branch
  SCALAR_T* y = out + row * out_stride;
  if (__builtin_expect(whole, 1)) store_pieces(y, some, first, size);
  else if (mine) run_elements(y, gate, int64_t(thread) * Piece::kSize, d);
}
