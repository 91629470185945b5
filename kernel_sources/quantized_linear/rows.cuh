// How rows of x lie in shared memory.
//
// Eight lanes load 16 bytes each at once, four of one row and four of the next. A row is 256 bytes,
// so odd rows have their halves of 128 bytes in another order: all eight then use different banks.
#pragma once
#include "kiln/ptx/async.cuh"

namespace kiln {

// Tiles of kRows x 128 inputs. Rows and inputs that do not exist are zeros.
template <class T, int kRows> struct Inputs {
  static constexpr int kPitch = 256, kBytes = kRows * kPitch;

  const T* first;  // the run's first row
  int64_t stride;
  int count, inputs;

  KILN_FN static int place(int row, int piece) {
    return row * kPitch + (piece ^ row % 2 * 4) * 16;
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
