// Which rows of x a block multiplies, where they are sorted by expert.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

// The rows that a block multiplies: `count` rows of one expert, beginning with row `first`. Without
// experts, the expert is 0.
struct Run { int expert, first, count; };

// Return this block's run of at most kRows rows, by blockIdx.y; its count is 0 if there is none.
// Row m belongs to experts[m], and the rows of expert e end at ends[e]. An expert with more than
// kRows rows has several runs. They begin at its first row, and every kRows rows from there.
//   blockIdx.y < min(rows, num_experts)   the first run of an expert. With as many rows as experts
//                                         or more, the block's expert is blockIdx.y. With fewer
//                                         rows it looks at row blockIdx.y, and multiplies if that
//                                         is the first row of its expert.
//   blockIdx.y behind these               a further run. The block looks at kRows rows. One of them
//                                         at most begins a further run, because two such rows are
//                                         at least kRows apart. The first kRows rows have none.
template <int kRows>
KILN_FN Run run_of_block(const int32_t* experts, const int32_t* ends, int rows, int num_experts) {
  const int block = blockIdx.y, firsts = min(rows, num_experts), last = ends[num_experts - 1];
  const auto begin_of = [&](int expert) { return expert ? ends[expert - 1] : 0; };
  if (block < firsts && rows >= num_experts) {
    const int begin = begin_of(block);
    return {block, begin, min(ends[block] - begin, kRows)};
  }
  if (block < firsts) {
    const int expert = block < last ? experts[block] : 0;
    const bool is_first = block < last && begin_of(expert) == block;
    return {expert, block, is_first ? min(ends[expert] - block, kRows) : 0};
  }
  const int own = (block - firsts + 1) * kRows + threadIdx.x % kRows;
  const int expert = own < last ? experts[own] : 0, place = own - begin_of(expert);
  const uint32_t found =
      __ballot_sync(0xffffffffu, own < last && place > 0 && place % kRows == 0);
  if (!found) return {0, 0, 0};
  const int from = __ffs(found) - 1;
  const int first = __shfl_sync(0xffffffffu, own, from);
  const int its = __shfl_sync(0xffffffffu, expert, from);
  return {its, first, min(ends[its] - first, kRows)};
}

}  // namespace kiln
