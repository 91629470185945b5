// A row processed by a team of threads, each holding a part of it in registers.
//
// A team is the blockDim.x threads of one threadIdx.y: 16, 32, or a multiple of 128 with one team a
// block. Its size depends on the row's width and type only, and each thread has the same elements
// in the same order on both paths below. So a row's bits do not depend on the number of rows, its
// index, its alignment or the grid. A kernel with much work for a row may run half of the threads,
// each doing the work of two; see double_team_sum.
//
//   held     rows of whole aligned chunks, at most kChunks a thread: read once, all loads in flight
//   general  any width and alignment: element by element, read again whenever the row is needed
//
// With few rows, most of a launch's time goes to fetching instructions, so the held path is short,
// straight and uses 32-bit indices. The general path costs the held path only compile time, so it
// has as little code as possible.
//
// A Source has kChunks, the chunks that a thread holds; load(index, size), which starts to read the
// thread's part of a held row of `size` elements (0: the team has no row); held_row(index, size,
// narrow, loaded), which reduces that row; and row(index, size), which reduces a general row. The
// held row's values() returns the thread's part, the general row's value_at(i) any element. narrow:
// no thread has more than one chunk, so work on others may be skipped. A Sink has write(index,
// size, row). All threads of a block call both once. Both have misalignment(): 0 modulo 16 if all
// rows are aligned for the held path.
#pragma once
#include "kiln/rows/chunk.cuh"
#include "kiln/ptx/memory.cuh"
#include "kiln/ptx/warp.cuh"
#include "kiln/rows/vec.cuh"

namespace kiln {

template <class T, int N> struct RowPart { Chunk<T> chunk[N]; };  // N: 1, 2 or 4

// First element of this thread's first chunk, and elements between its chunks. Unsigned, so that
// adding one to an address takes one instruction.
template <class T> KILN_FN uint32_t first_chunk() { return threadIdx.x * Chunk<T>::kSize; }
template <class T> KILN_FN uint32_t team_span() { return blockDim.x * Chunk<T>::kSize; }

// 0 modulo 16 if the address, and the stride if any, are multiples of 16 bytes.
template <class T> KILN_FN uint32_t misalignment_of(const T* p) {
  return uint32_t(reinterpret_cast<uint64_t>(p));
}
template <class T> KILN_FN uint32_t misalignment_of(const T* first, int64_t stride) {
  return misalignment_of(first) | uint32_t(stride) * sizeof(T);
}

// Held path: `size` elements in whole chunks. What follows them is zero, and is not stored.
template <class T, int N> struct Loading { RowPart<T, N>& part; const T* row; };
template <class T, int N> KILN_FN void load_chunk(Loading<T, N>& one, int v, bool exists) {
  one.part.chunk[v] = Chunk<T>{};
  if (exists) one.part.chunk[v] = Chunk<T>::load(one.row);
  one.row += team_span<T>();
}
// Load all parts, interleaved chunk by chunk.
template <class T, int N, class... More>
KILN_FN void load_parts(uint32_t size, Loading<T, N> first, More... more) {
  uint32_t i = first_chunk<T>();
  first.row += i;
  ((more.row += i), ...);
#pragma unroll
  for (int v = 0; v < N; ++v, i += team_span<T>()) {
    load_chunk(first, v, i < size);
    (load_chunk(more, v, i < size), ...);
  }
}
template <class T, int N>
KILN_FN void store_part(const RowPart<T, N>& part, T* row, uint32_t size) {
  uint32_t i = first_chunk<T>();
  T* p = row + i;
#pragma unroll
  for (int v = 0; v < N; ++v, i += team_span<T>(), p += team_span<T>())
    if (i < size) part.chunk[v].store(p);
}

// Prefetch this thread's part of a row.
template <class T, int N> KILN_FN void hint_part(const T* row, uint32_t size) {
  uint32_t i = first_chunk<T>();
#pragma unroll
  for (int v = 0; v < N; ++v, i += team_span<T>())
    if (i < size) prefetch(row + i);
}

// General path: call f(i) for this thread's elements from `begin`, a multiple of the team's span,
// to `end`, in the order of its chunks.
template <class T, class F>
KILN_FN void for_each_element(int64_t begin, int64_t end, const F& f) {
  constexpr int kSize = Chunk<T>::kSize;
  int64_t i = begin + first_chunk<T>();
#pragma unroll 1
  while (i < end) {
    f(i);
    if (++i % kSize == 0) i += team_span<T>() - kSize;
  }
}

struct Larger {
  KILN_FN static uint32_t of(uint32_t a, uint32_t b) { return a < b ? b : a; }
};

// Shared memory for the warps of a team to exchange results; one for each reduction of a kernel.
template <class T> struct alignas(16) Partial { T of_warp[32]; };

// The sum over four warps.
KILN_FN float sum_four(const Partial<float>& partial, int first) {
  const auto some = load_vector<Vec<float, 4>>(partial.of_warp + first);
  return add_rn(add_rn(some.v[0], some.v[1]), add_rn(some.v[2], some.v[3]));
}
KILN_FN float sum_warps(const Partial<float>& partial, int warps) {
  float x = sum_four(partial, 0);
  if (warps > 4) x = add_rn(x, sum_four(partial, 4));
#pragma unroll 1
  for (int w = 8; w < warps; w += 4) x = add_rn(x, sum_four(partial, w));
  return x;
}

// The sum over the team, in every thread. Its order depends on the team's size alone. partial: in
// shared memory.
KILN_FN float team_sum(float x, Partial<float>& partial) {
  if (blockDim.x > 16) x = add_rn(x, __shfl_xor_sync(0xffffffffu, x, 16));
#pragma unroll
  for (int m = 8; m; m >>= 1) x = add_rn(x, __shfl_xor_sync(0xffffffffu, x, m));
  if (blockDim.x <= 32) return x;
  if (threadIdx.x % 32 == 0) partial.of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return sum_warps(partial, int(blockDim.x) / 32);
}

// team_sum for a team of twice the block's threads: x is this thread's value, y that of the thread
// blockDim.x further, which it replaces. The order is that of team_sum.
KILN_FN float double_team_sum(float x, float y, Partial<float>& partial) {
  if (blockDim.x == 16) {
    x = add_rn(x, y);
  } else {
    x = add_rn(x, __shfl_xor_sync(0xffffffffu, x, 16));
    y = add_rn(y, __shfl_xor_sync(0xffffffffu, y, 16));
  }
#pragma unroll
  for (int m = 8; m; m >>= 1) {
    x = add_rn(x, __shfl_xor_sync(0xffffffffu, x, m));
    y = add_rn(y, __shfl_xor_sync(0xffffffffu, y, m));
  }
  if (blockDim.x == 16) return x;
  const int warps = int(blockDim.x) / 32;
  if (threadIdx.x % 32 == 0) {
    partial.of_warp[threadIdx.x / 32] = x;
    partial.of_warp[threadIdx.x / 32 + warps] = y;
  }
  __syncthreads();
  return sum_warps(partial, 2 * warps);
}

// The maximum over the team, in every thread. partial: in shared memory.
KILN_FN uint32_t team_largest(uint32_t x, Partial<uint32_t>& partial) {
  if (blockDim.x <= 16) {
#pragma unroll 1
    for (int m = 8; m; m >>= 1) x = Larger::of(x, __shfl_xor_sync(0xffffffffu, x, m));
    return x;
  }
  x = warp_largest(x);
  if (blockDim.x <= 32) return x;
  const uint32_t lane = threadIdx.x % 32;
  if (lane == 0) partial.of_warp[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_largest(32 * lane < blockDim.x ? partial.of_warp[lane] : 0);
}

// Not inlined: it would take registers from the held path.
template <class Source, class Sink>
KILN_NOINLINE void run_general(Source source, Sink sink, uint32_t row, int64_t size) {
  sink.write(row, size, source.row(row, size));
}

// Prefetch what the first blocks of a launch will read, while they wait for the kernel ahead:
// source.hint(index, size), one thread for each cache line. Later blocks do not wait and gain
// nothing; more prefetches would delay the first blocks' reads.
template <class T, class Source>
KILN_FN void hint_rows(const Source& source, int64_t rows, int64_t d) {
  constexpr uint32_t kWaiting = 264;  // two for each SM of a large GPU
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const bool mine = blockIdx.x < kWaiting && row < uint32_t(rows);
  if (mine && threadIdx.x % 8 == 0) source.hint(row, uint32_t(d));
}

// Process the block's rows, from source to sink. Fewer than 2^31 rows.
template <class T, class Source, class Sink>
KILN_FN void run_rows(const Source& source, const Sink& sink, int64_t rows, int64_t d) {
  const uint32_t row = blockIdx.x * blockDim.y + threadIdx.y;
  const uint32_t odd = source.misalignment() | sink.misalignment() | uint32_t(d) * sizeof(T);
  const bool mine = row < uint32_t(rows);
  const bool fits = uint64_t(d) <= Source::kChunks * team_span<T>();
  const bool held = uint32_t(odd % 16 == 0) & uint32_t(fits);  // one branch, not two
  const uint32_t size = held && mine ? uint32_t(d) : 0;
  const auto loaded = source.load(row, size);  // in flight before the first branch
  if (held) {
    const bool narrow = uint32_t(d) <= team_span<T>();
    sink.write(row, size, source.held_row(row, size, narrow, loaded));
  } else {
    run_general(source, sink, row, mine ? d : 0);
  }
}

// A sink that stores rows unchanged.
template <class T> struct StoreRows {
  T* out;
  int64_t stride;

  KILN_FN uint32_t misalignment() const { return misalignment_of(out, stride); }
  template <class Row> KILN_FN void write(int64_t index, int64_t size, const Row& row) const {
    T* y = out + index * stride;
    if constexpr (Row::kHeld) {
      store_part(row.values(), y, uint32_t(size));
    } else {
      for_each_element<T>(0, size, [&](int64_t i) { y[i] = row.value_at(i); });
    }
  }
};

}  // namespace kiln
