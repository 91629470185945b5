// How a request's decode attention is cut into work items: the rule that the plan and the kernel
// share. It looks at the request itself and at constants of the machine, never at the batch.
#pragma once
#include "kiln/ptx.cuh"

namespace kiln {

constexpr int kKVBlock = 16;     // tokens of a block of the pool
constexpr int kTileRows = 16;    // (token, head of the group) rows of an mma tile
constexpr int kMostTokens = 16;  // a request with more query tokens is prefill's
constexpr int kFirstIds = 8;

// Part of one request's work: all that a block must know to begin. Tables of them start with a
// header, in which `request` counts the items and `first_token` the rows of partial results.
struct alignas(16) WorkItem {
  int request, first_token;
  int size;                    // number of splits << 8 | query tokens
  int seq_len;
  int part;                    // tile << 16 | split
  int row_start;               // rows of partial results, of one KV head, before this request's
  int first_block, end_block;  // of the request's own blocks
  int ids[kFirstIds];          // of the first of them in the pool
};

struct RequestCut {
  int first_block, num_blocks;  // that any of its tokens sees
  int num_tiles, num_splits;    // num_tiles 0: there is nothing to do here

  // Where a split begins, in blocks of the request; split == num_splits gives the end of the last.
  KILN_FN int begin(int split) const { return first_block + split * num_blocks / num_splits; }
};

// What a split of a request is: `blocks` blocks; beyond `few` of them, four times as many. `most`
// at most in all of a request's tiles: below 32768, and its product with the blocks below 2^31.
struct SplitRule { int most, blocks, few; };

KILN_FN RequestCut cut_request(int num_tokens, int seq_len, int group, int window, SplitRule rule) {
  RequestCut x;
  x.first_block = window ? max(0, seq_len - num_tokens + 1 - window) / kKVBlock : 0;
  x.num_blocks = (seq_len + kKVBlock - 1) / kKVBlock - x.first_block;
  x.num_tiles = num_tokens <= kMostTokens ? (num_tokens * group + kTileRows - 1) / kTileRows : 0;
  const int most = max(1, rule.most / max(1, x.num_tiles));
  int splits = (x.num_blocks + rule.blocks - 1) / rule.blocks;
  if (splits > rule.few) splits = rule.few + (splits - rule.few + 3) / 4;
  x.num_splits = max(1, min(splits, most));
  return x;
}

}  // namespace kiln
