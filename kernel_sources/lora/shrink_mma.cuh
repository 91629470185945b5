// lora_shrink for bf16 and fp16, on tensor cores. The rows of an mma are columns of h, and its
// columns are tokens.
#pragma once
#include "kiln/ptx/early.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/mma.cuh"
#include "kiln/rows/vec.cuh"
#include "kiln/rows/words.cuh"
#include "lora/parts.cuh"

namespace kiln {

// Load the elements i to i + 7 of a row; those behind its end are zeros. kAligned: the row begins
// at a multiple of 16 bytes, and its size is a multiple of 8. It does not change the result.
template <bool kAligned, class T> KILN_FN Words part_of_row(const T* row, int i, int size) {
  if (i >= size) return Words{};
  if constexpr (kAligned) return load_early_vector<Words>(row + i);
  else return words_of(row + i, min(size - i, 8));
}

template <class T>
KILN_FN void multiply(float (&sum)[4], const Words& u, const Words& v, const Words& x) {
  mma_m16n8k16<T>(sum, {u.w[0], v.w[0], u.w[1], v.w[1]}, x.w[0], x.w[1]);
  mma_m16n8k16<T>(sum, {u.w[2], v.w[2], u.w[3], v.w[3]}, x.w[2], x.w[3]);
}

// Write this warp's partial sums for N groups of 8 tokens, from the group `first` on. The warps of
// a slice take its groups of 32 elements in turn. A lane loads 8 neighbouring elements of each of
// its rows, which are its operands of two mma. Lanes without a token, or without a row of A, load
// another one, and nobody reads their sums.
template <int N, int kBatch, bool kAligned, class T>
KILN_FN void group_sums(Sums sums, const StackedRows<T>& a, Slice slice, int column, const T* x,
                        int64_t x_stride, const int32_t* tokens, int first) {
  const int lane = threadIdx.x % 32, group = lane / 4, own = lane % 4 * 8;
  const int step = 32 * slice.warps;
  const T *row0 = a.row(column + group), *row1 = a.row(column + group + 8), *xs[N];
  if (!row0) row0 = a.row(column);
  if (!row1) row1 = row0;
  float sum[N][4] = {};
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int token = load_early(tokens + (first + n) * 8 + group);
    xs[n] = x + (token < 0 ? load_early(tokens) : token) * x_stride;
  }
  const int full = kAligned ? slice.end & ~31 : 0;  // where the last whole group ends
  int begin = slice.begin + 32 * slice.warp;
  bool waited = false;
  for (; begin < full; begin += kBatch * step) {
    Words u[kBatch], v[kBatch], w[kBatch][N];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      if (begin + j * step < full) {
        u[j] = load_early_vector<Words>(row0 + begin + j * step + own);
        v[j] = load_early_vector<Words>(row1 + begin + j * step + own);
      }
    if (!waited) pdl_wait();
    waited = true;
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (begin + j * step < full)
          w[j][n] = load_vector<Words>(xs[n] + begin + j * step + own);
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
#pragma unroll
      for (int n = 0; n < N; ++n)
        if (begin + j * step < full) multiply<T>(sum[n], u[j], v[j], w[j][n]);
  }
  if (!waited) pdl_wait();
  // The elements behind the last whole group of 32. If rows are not aligned, these are all
  // elements.
  begin = slice.begin + 32 * slice.warp;
  if (begin < full) begin += (full - begin + step - 1) / step * step;
  for (; begin < slice.end; begin += step) {
    const Words u = part_of_row<kAligned>(row0, begin + own, slice.end);
    const Words v = part_of_row<kAligned>(row1, begin + own, slice.end);
#pragma unroll
    for (int n = 0; n < N; ++n)
      multiply<T>(sum[n], u, v, part_of_row<kAligned>(xs[n], begin + own, slice.end));
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sums[(first + n) * 8 + lane % 4 * 2 + j % 2][group + j / 2 * 8] = sum[n][j];
}

template <class T>
KILN_FN bool is_aligned(const StackedRows<T>& a, const T* x, int64_t x_stride) {
  return a.size % 8 == 0 && x_stride % 8 == 0 && is_vector_aligned(x) && a.is_aligned();
}

// Write this warp's partial sums of a tile of 16 or 32 tokens. It calls pdl_wait before it reads x.
template <class T>
KILN_FN void tile_sums(Sums sums, const StackedRows<T>& a, Slice slice, int column, const T* x,
                       int64_t x_stride, const int32_t* tokens, int tile) {
  if (tile == 16 && is_aligned(a, x, x_stride))
    group_sums<2, 2, true>(sums, a, slice, column, x, x_stride, tokens, 0);
  else
    for (int first = 0; first < tile / 8; ++first)
      group_sums<1, 1, false>(sums, a, slice, column, x, x_stride, tokens, first);
}

// A lane's operands for 32 elements of the rows: of two rows of A, and of N tokens.
template <int N> struct Operands { Words u, v, x[N]; };

// Write the sums of a whole slice for a tile of 32 tokens, with one warp. It computes the partial
// sums of all warps of the slice one after the other, and adds them in the order of the warps. It
// calls pdl_wait before it reads x. Return false, and do nothing, if the rows are not aligned.
template <class T>
KILN_FN bool whole_slice(Sums sums, const StackedRows<T>& a, Slice slice, int column, const T* x,
                         int64_t x_stride, const int32_t* tokens) {
  if (!is_aligned(a, x, x_stride)) return false;
  constexpr int N = 4;
  const int lane = threadIdx.x % 32, own = slice.begin + lane % 4 * 8;
  const T *row0 = a.row(column + lane / 4), *row1 = a.row(column + lane / 4 + 8), *xs[N];
  if (!row0) row0 = a.row(column);
  if (!row1) row1 = row0;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int token = load_early(tokens + n * 8 + lane / 4);
    xs[n] = x + (token < 0 ? load_early(tokens) : token) * x_stride;
  }
  const auto load = [&](int group) {
    Operands<N> next{};
    const int i = own + 32 * group;
    if (i >= slice.end) return next;
    next.u = load_early_vector<Words>(row0 + i);
    next.v = load_early_vector<Words>(row1 + i);
#pragma unroll
    for (int n = 0; n < N; ++n) next.x[n] = load_vector<Words>(xs[n] + i);
    return next;
  };
  pdl_wait();
  const int groups = (slice.end - slice.begin + 31) / 32;
  float total[N][4] = {}, sum[N][4] = {};
  Operands<N> now = load(0);
  for (int warp = 0, group = 0; warp < slice.warps;) {
    const bool ends = group + slice.warps >= groups;  // the partial sums of this warp
    const int next = ends ? warp + 1 : group + slice.warps;
    const Operands<N> later = load(next);
#pragma unroll
    for (int n = 0; n < N; ++n) multiply<T>(sum[n], now.u, now.v, now.x[n]);
    now = later;
    group = next;
    if (!ends) continue;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        total[n][j] = warp ? add_rn(total[n][j], sum[n][j]) : sum[n][j];
        sum[n][j] = 0;
      }
    ++warp;
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      sums[n * 8 + lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = total[n][j];
  return true;
}

}  // namespace kiln
