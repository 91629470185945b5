// Rows of x: which of them a block multiplies, and how they lie in shared memory.
//
// Eight lanes load a piece of 16 bytes each at once, four of one row and four of the next. A row is
// 256 bytes, so odd rows have their pieces in another order: all eight then use different banks.
// Beside 4-bit codes four lanes load neighbours, and odd rows have their halves of 128 bytes
// swapped; beside 8-bit codes they load every other piece, and odd rows have neighbours swapped.
#pragma once
#include "kiln/ptx/async.cuh"

namespace kiln {

constexpr uint32_t kAll = 0xffffffffu;

// The rows that a block multiplies at a time: `count` rows of one expert, beginning with `first`.
struct Run { int expert, first, count; };

// Return the block-th run of at most kRows rows; its count is 0 if there are fewer runs. Rows are
// sorted by expert, and those of expert e end at ends[e]. A whole warp calls this.
template <int kRows> KILN_FN Run run_of_expert(const int32_t* ends, int experts, int block) {
  constexpr int kAtOnce = 4;  // loads in flight
  const int lane = threadIdx.x % 32;
  int runs = 0, last = 0;  // of all experts before
  Run run{0, 0, 0};
#pragma unroll 1
  for (int e = lane; e - lane < experts && run.count == 0; e += 32 * kAtOnce) {
    int end[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) end[i] = e + 32 * i < experts ? ends[e + 32 * i] : -1;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      __syncwarp();
      const int before = __shfl_up_sync(kAll, end[i], 1), begin = lane ? before : last;
      const int own = end[i] < 0 ? 0 : (end[i] - begin + kRows - 1) / kRows;
      int upto = own;  // runs of this expert and of those before
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kAll, upto, step);
        if (lane >= step) upto += other;
      }
      upto += runs;
      const uint32_t found = __ballot_sync(kAll, upto > block);
      if (found && run.count == 0) {
        const int from = __ffs(found) - 1, first = begin + (block - (upto - own)) * kRows;
        run.expert = __shfl_sync(kAll, e + 32 * i, from);
        run.first = __shfl_sync(kAll, first, from);
        run.count = __shfl_sync(kAll, min(end[i] - first, kRows), from);
      }
      runs = __shfl_sync(kAll, upto, 31);
      last = __shfl_sync(kAll, end[i], 31);
    }
  }
  return run;
}

// Return the block-th run of at most kRows of all rows.
template <int kRows> KILN_FN Run run_of_rows(int rows, int block) {
  return {0, block * kRows, min(rows - block * kRows, kRows)};
}

// Tiles of kRows x 128 inputs, beside codes of kBits. Rows and inputs that do not exist are zeros.
template <class T, int kRows, int kBits> struct Inputs {
  static constexpr int kPitch = 256, kBytes = kRows * kPitch, kSwap = kBits == 4 ? 4 : 1;

  const T* first;  // the run's first row
  int64_t stride;
  int count, inputs;

  KILN_FN static int place(int row, int piece) {
    return row * kPitch + (piece ^ row % 2 * kSwap) * 16;
  }
  KILN_FN void fetch(unsigned char* to, int chunk) const {
    const int row = threadIdx.x / 16, piece = threadIdx.x % 16, k = chunk * 128 + piece * 8;
    const T* from = first + row * stride + k;
    const int left = k < inputs ? count - row : 0;
#pragma unroll
    for (int i = 0; i < kRows; i += 8, from += 8 * stride)
      copy_async_16(to + place(row + i, piece), from, i < left);
  }
};

}  // namespace kiln
