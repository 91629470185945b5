// A row shared by a team of threads, each holding its part in registers.
//
// A team is the blockDim.x threads of one threadIdx.y: 16, 32, or 64 or a multiple of 128 that is
// alone in its block. Its size depends on the row's width and type alone, and each thread has the
// same elements in the same order either way below. So a row's bits depend on nothing else: not on
// the number of rows, its place among them, its alignment or the grid.
//
//   held     rows of whole aligned chunks, at most kChunks a thread: read once, all loads at once
//   general  any width, any alignment: element by element, for each time that the row is needed
//
// A launch of few rows takes as long as its instructions take to be fetched: what is executed on
// the held way is short, straight and 32 bits wide. What stands behind the branch not taken is free
// there, but takes time to compile: the general way is as little code as can be.
//
// A source has row<HELD>(index, size), which reads a row of `size` elements, 0 for a team without
// one, and reduces it; of what that returns, values() is the thread's part of a held row and
// value_at(i) the element i of any. A sink has write(index, size, row). All threads of a block
// come through both, once. Both have misalignment(): 0 modulo 16 where every row may be held.
#pragma once
#include "kiln/chunk.cuh"
#include "kiln/vec.cuh"

namespace kiln {

constexpr int kChunks = 2;  // chunks of a row that one thread holds

template <class T> struct RowPart { Chunk<T> chunk[kChunks]; };

// Where the first chunk of this thread starts, and how far apart its chunks are.
template <class T> KILN_FN int first_chunk() { return int(threadIdx.x) * Chunk<T>::kSize; }
template <class T> KILN_FN int team_span() { return int(blockDim.x) * Chunk<T>::kSize; }

// How far from 16-byte boundaries, modulo 16, with all zero where there is no distance.
template <class T> KILN_FN uint32_t misalignment_of(const T* p) {
  return uint32_t(reinterpret_cast<uint64_t>(p));
}
template <class T> KILN_FN uint32_t misalignment_of(const T* first, int64_t stride) {
  return misalignment_of(first) | uint32_t(stride) * sizeof(T);
}

// Held: `size` elements, whole chunks. What lies past them is zero, and is not stored.
template <class T> KILN_FN void load_part(RowPart<T>& part, const T* row, int size) {
  int i = first_chunk<T>();
  const T* p = row + i;
#pragma unroll
  for (int v = 0; v < kChunks; ++v, i += team_span<T>(), p += team_span<T>()) {
    part.chunk[v] = Chunk<T>{};
    if (i < size) part.chunk[v] = Chunk<T>::load(p);
  }
}
template <class T> KILN_FN void store_part(const RowPart<T>& part, T* row, int size) {
  int i = first_chunk<T>();
  T* p = row + i;
#pragma unroll
  for (int v = 0; v < kChunks; ++v, i += team_span<T>(), p += team_span<T>())
    if (i < size) part.chunk[v].store(p);
}

// General: f(i) for those of the elements from `begin`, a multiple of the team's span, to `end`
// that are this thread's, in the order of its chunks.
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

struct Add {
  KILN_FN static float of(float a, float b) { return add_rn(a, b); }
};
struct Larger {
  KILN_FN static uint32_t of(uint32_t a, uint32_t b) { return a < b ? b : a; }
};

// What the warps of a team have to say to each other; one for each reduction of a kernel.
template <class T> struct alignas(16) Partial { T of_warp[32]; };

// Op over four warps.
template <class Op, class T> KILN_FN T reduce_four(const Partial<T>& partial, int first) {
  const auto some = load_vector<Vec<T, 4>>(partial.of_warp + first);
  return Op::of(Op::of(some.v[0], some.v[1]), Op::of(some.v[2], some.v[3]));
}

// Give the team what each of its warps has, where it has more than one.
template <class T> KILN_FN void share(T x, Partial<T>& partial) {
  if (threadIdx.x % 32 == 0) {
    partial.of_warp[threadIdx.x / 32] = x;
    if (blockDim.x == 64) partial.of_warp[threadIdx.x / 32 + 2] = T(0);
  }
  __syncthreads();
}

// Op over the team, in every thread; the order depends on the team's size alone, and 0 changes
// nothing. partial: shared.
template <class Op, class T> KILN_FN T team_reduce(T x, Partial<T>& partial) {
  if (blockDim.x > 16) x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, 16));
#pragma unroll
  for (int m = 8; m; m >>= 1) x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, m));
  if (blockDim.x <= 32) return x;
  share(x, partial);
  const int warps = int(blockDim.x) / 32;
  x = reduce_four<Op>(partial, 0);
  if (warps > 4) x = Op::of(x, reduce_four<Op>(partial, 4));
#pragma unroll 1
  for (int w = 8; w < warps; w += 4) x = Op::of(x, reduce_four<Op>(partial, w));
  return x;
}

// The same, in less code, for the general way.
template <class Op, class T> KILN_FN T team_reduce_rolled(T x, Partial<T>& partial) {
#pragma unroll 1
  for (int m = blockDim.x > 16 ? 16 : 8; m; m >>= 1)
    x = Op::of(x, __shfl_xor_sync(0xffffffffu, x, m));
  if (blockDim.x <= 32) return x;
  share(x, partial);
  T all = T(0);
#pragma unroll 1
  for (int w = 0; w < int(blockDim.x) / 32; w += 4) all = Op::of(all, reduce_four<Op>(partial, w));
  return all;
}

// Not inlined: it would take registers from the held way.
template <class Source, class Sink>
KILN_NOINLINE void run_general(Source source, Sink sink, int64_t row, int64_t size) {
  sink.write(row, size, source.template row<false>(row, size));
}

// The block's rows from source to sink.
template <class T, class Source, class Sink>
KILN_FN void run_rows(const Source& source, const Sink& sink, int64_t rows, int64_t d) {
  const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const uint32_t odd = source.misalignment() | sink.misalignment() | uint32_t(d) * sizeof(T);
  if (__builtin_expect(odd % 16 == 0 && d <= kChunks * team_span<T>(), 1)) {
    const int size = row < rows ? int(d) : 0;
    sink.write(row, size, source.template row<true>(row, size));
  } else {
    run_general(source, sink, row, row < rows ? d : 0);
  }
}

// The sink that stores rows as they are.
template <class T> struct StoreRows {
  T* out;
  int64_t stride;

  KILN_FN uint32_t misalignment() const { return misalignment_of(out, stride); }
  template <class Row> KILN_FN void write(int64_t index, int64_t size, const Row& row) const {
    T* y = out + index * stride;
    if constexpr (Row::kHeld) {
      store_part(row.values(), y, int(size));
    } else {
      for_each_element<T>(0, size, [&](int64_t i) { y[i] = row.value_at(i); });
    }
  }
};

}  // namespace kiln
