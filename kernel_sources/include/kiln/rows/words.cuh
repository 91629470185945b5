// Eight neighbouring elements of a row, of bf16 or fp16.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

struct alignas(16) Words { uint32_t w[4]; };

// Load `left` elements from p on; the rest of the eight are zeros. Only the ends of rows and
// unaligned rows need this function, so it is not inlined: less code compiles faster.
template <class T> KILN_NOINLINE Words words_of(const T* p, int left) {
  Words words{};
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (j < left) words.w[j / 2] |= uint32_t(p[j].bits) << j % 2 * 16;
  return words;
}

}  // namespace kiln
