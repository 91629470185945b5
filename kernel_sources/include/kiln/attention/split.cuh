// How a request's decode attention is cut into work items: the rule that the plan and the kernel
// share. What is added up, and in which order, looks at the request itself and at constants of the
// machine, never at the batch: a request is cut into splits, a split into as many shares as a block
// has warps and, of a divisible request, a share into as many units. All of them are added up as a
// binary tree. Who adds them up may look at the batch: a block takes a split, each warp a share; or,
// where a batch would leave much of the machine idle, half or a quarter of a split of a divisible
// request, and each warp half or a quarter of a share.
#pragma once
#include "kiln/ptx/ptx.cuh"

namespace kiln {

constexpr int kKVBlock = 16;     // tokens of a block of the pool
constexpr int kPairBlocks = 2;   // of the pool, that a warp takes at a time
constexpr int kTileRows = 16;    // (token, head of the group) rows of an mma tile
constexpr int kMostTokens = 16;  // a request with more query tokens is prefill's
constexpr int kFirstIds = 8;

enum class Part { split, split_in_units, half, quarter };  // what an item is

// Part of one request's work: all that a block must know to begin. Tables of them start with a
// header, in which `request` counts the items and `first_token` the rows of partial results.
struct alignas(16) WorkItem {
  int request, first_token;
  int size;                    // number of parts << 8 | query tokens
  int seq_len;
  int place;                   // Part << 29 | tile << 16 | which part
  int row_start;               // rows of partial results, of one KV head, before this request's
  int first_block, end_block;  // of the split, of the request's own blocks
  int ids[kFirstIds];          // in the pool of each warp's first pair of blocks

  KILN_FN int num_parts() const { return size >> 8; }
  KILN_FN int num_tokens() const { return size & 255; }
  KILN_FN Part kind() const { return Part(place >> 29); }
  KILN_FN int tile() const { return place >> 16 & 0x1fff; }
  KILN_FN int part() const { return place & 0xffff; }
};

struct RequestCut {
  int first_block, num_blocks;  // that any of its tokens sees
  int num_tiles, num_splits;    // num_tiles 0: there is nothing to do here
  bool divisible;               // its shares have units

  // Where a split begins, in blocks of the request; split == num_splits gives the end of the last.
  // All but the last hold whole pairs of blocks.
  KILN_FN int begin(int split) const {
    const int pairs = (num_blocks + kPairBlocks - 1) / kPairBlocks;
    return first_block + min(num_blocks, split * pairs / num_splits * kPairBlocks);
  }
};

constexpr int kFanBits = 5, kFanIn = 1 << kFanBits;  // partial results merged at once, as a tree

// How many splits a request has: up to `few` one for each `blocks` blocks; then twice as many,
// again and again, as long as each has `longer` times that, and no more than `most` come of it. `most`
// items of one KV head fill the machine: at most as many in all of a request's tiles, below 32768,
// and its product with the blocks below 2^31. So as many divisible requests of one length as are a
// power of two have items that fill it, or nearly, where they have `most` times `blocks` blocks in
// all. A block has 2^warp_bits warps.
struct SplitRule {
  int most, blocks, few, longer, warp_bits;

  KILN_FN int splits(int num_blocks) const {
    const int pieces = (num_blocks + blocks - 1) / blocks;
    if (pieces <= few) return pieces;
    int splits = few;
    while (splits * 2 * longer <= pieces && splits * 2 <= most) splits *= 2;
    return splits;
  }
};

// Where unit i of a split begins, in its pairs of blocks; a share begins with its first unit.
KILN_FN int unit_begin(int i, int num_pairs, int warp_bits) {
  return i * num_pairs >> 2 * warp_bits;
}
// How many times a split was halved to be such an item.
KILN_FN int halvings_of(Part kind) { return max(0, int(kind) - int(Part::split_in_units)); }
// How many parts the nodes have, as a power of two, in which parts are added up first: those of
// eight splits, however these are cut, of a divisible request; and kFanIn of any other.
KILN_FN int node_bits_of(Part kind) {
  return kind == Part::split ? kFanBits : 3 + halvings_of(kind);
}
// How many units of its item a warp has, and with which of its split it begins.
KILN_FN int units_of_warp(Part kind, int warp_bits) { return 1 << (warp_bits - halvings_of(kind)); }
KILN_FN int first_unit(Part kind, int part, int warp, int warp_bits) {
  const int halvings = halvings_of(kind), own = part & ((1 << halvings) - 1);
  return (own << (2 * warp_bits - halvings)) + warp * units_of_warp(kind, warp_bits);
}

KILN_FN RequestCut cut_request(int num_tokens, int seq_len, int group, int window, SplitRule rule) {
  RequestCut x;
  x.first_block = window ? max(0, seq_len - num_tokens + 1 - window) / kKVBlock : 0;
  x.num_blocks = (seq_len + kKVBlock - 1) / kKVBlock - x.first_block;
  x.num_tiles = num_tokens <= kMostTokens ? (num_tokens * group + kTileRows - 1) / kTileRows : 0;
  const int most = max(1, rule.most / max(1, x.num_tiles));
  x.num_splits = max(1, min(rule.splits(x.num_blocks), most));
  // Rows of half a tile, whose sums a warp has room for thrice; a pair of blocks for each unit; and
  // whole nodes of eight splits, in which they are added up, or one.
  const int shares = x.num_splits << rule.warp_bits;
  x.divisible = num_tokens * group <= kTileRows / 2 &&
                (x.num_splits <= 8 || x.num_splits % 8 == 0) &&
                x.num_blocks >= (shares << rule.warp_bits) * kPairBlocks;
  return x;
}

}  // namespace kiln
