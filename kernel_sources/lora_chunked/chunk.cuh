// What the kernels share: a chunk, which is CHUNK tokens of one adapter, and 16-byte loads of rows.
//
// A warp multiplies 16 tokens at a time. With g = lane / 4 and t = lane % 4, its lanes hold sums in
// the layout of mma.cuh: of 8 columns, lane's sum[0], sum[1] belong to token g and columns 2t,
// 2t + 1, and sum[2], sum[3] to token g + 8.
#pragma once
#include "kiln/ptx/mma.cuh"
#include "kiln/rows/vec.cuh"

namespace kiln {

// The part of sorted_token_ids that is one chunk. Numbers of `tokens` or more are padding.
struct Chunk {
  const int32_t* ids;
  int64_t tokens;

  KILN_FN bool has(int place) const { return ids[place] < tokens; }
  KILN_FN int64_t token(int place) const { return ids[place]; }
  // How many tiles of 16 places have tokens: padding is at the end.
  KILN_FN int num_tiles(int most) const {
    int count = 1;
    while (count < most && has(16 * count)) ++count;
    return count;
  }
};

struct alignas(16) Words { uint32_t v[4]; };

KILN_FN uint32_t bits_of(float x) { return as_uint(x); }
KILN_FN uint32_t bits_of(bf16 x) { return x.bits; }
KILN_FN uint32_t bits_of(fp16 x) { return x.bits; }

// Load the first `left` elements of a vector from p on; the others are zeros. It is rarely called,
// and so not inlined: less code compiles faster.
template <class T> KILN_NOINLINE Words elements_of(const T* p, int left) {
  constexpr int kOfWord = 4 / int(sizeof(T));
  Words words{};
#pragma unroll
  for (int j = 0; j < 4 * kOfWord; ++j)
    if (j < left) words.v[j / kOfWord] |= bits_of(p[j]) << (j % kOfWord * 16);
  return words;
}

// Load 16 bytes of a row from element i on. Elements behind its end are zeros, and so are all if
// row is null. The alignment of the row does not change the result.
template <class T> KILN_FN Words part_of_row(const T* row, int i, int size) {
  constexpr int kSize = Vec<T>::kSize;
  if (row == nullptr || i >= size) return Words{};
  if (is_vector_aligned(row + i) && i + kSize <= size) return load_vector<Words>(row + i);
  return elements_of(row + i, min(size - i, kSize));
}

}  // namespace kiln
