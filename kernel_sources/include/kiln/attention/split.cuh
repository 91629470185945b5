// Cuts a request's decode attention into work items; the plan and the kernel share this rule. A
// request is cut into splits, a split into one share for each warp of a block, and a share of a
// divisible request into as many units again. Their results are merged in a binary tree. Cut and
// tree depend on the request and on constants of the GPU, never on the batch. Which block computes
// what may depend on the batch: a block takes a split and each warp a share, or, to fill the GPU, a
// block takes half or a quarter of a divisible request's split, and each warp half or a quarter of
// a share. The result of an item is a part of its request.
#pragma once
#include "kiln/attention/visible.cuh"

namespace kiln {

constexpr int kKVBlock = 16;     // tokens of a KV block
constexpr int kPairBlocks = 2;   // KV blocks that a warp processes at a time
constexpr int kTileRows = 16;    // (token, head of the group) rows of an mma tile
constexpr int kMostTokens = 16;  // requests of more query tokens go to prefill
constexpr int kFirstIds = 8;

enum class Part { split, split_in_units, half, quarter };  // kind of a work item

// What a block needs to start on a part of a request. items[0] is a header: `request` is the number
// of items, `first_token` the number of rows of partial results.
struct alignas(16) WorkItem {
  int request, first_token;
  int size;                    // number of parts << 8 | other_tokens() << 5 | query tokens
  int seq_len;
  int place;                   // Part << 29 | shared << 28 | tile << 16 | which part
  int row_start;               // partial result rows of one KV head before this request
  int first_block, end_block;  // of the split, in blocks of the request
  int ids[kFirstIds];          // pool ids of each warp's first pair of blocks

  KILN_FN int num_parts() const { return size >> 8; }
  KILN_FN int num_tokens() const { return size & 31; }
  // Tokens of other requests between whose partial rows those of this item lie: its request shares
  // earlier parts with them.
  KILN_FN int other_tokens() const { return size >> 5 & 7; }
  // Whether each query token belongs to a request of its own, that of the first token or one of
  // those that follow. They see all keys of the item, whose blocks they share.
  KILN_FN bool is_shared() const { return place >> 28 & 1; }
  KILN_FN Part kind() const { return Part(place >> 29); }
  KILN_FN int tile() const { return place >> 16 & 0xfff; }
  KILN_FN int part() const { return place & 0xffff; }
};

struct RequestCut {
  int first_block, num_blocks;  // KV blocks that some token sees
  int num_tiles, num_splits;    // num_tiles 0: not a decode request
  bool divisible;               // its shares have units

  // Return the first block of a split; begin(num_splits) is the end of the last. All splits but the
  // last hold whole pairs of blocks.
  KILN_FN int begin(int split) const {
    const int pairs = (num_blocks + kPairBlocks - 1) / kPairBlocks;
    return first_block + min(num_blocks, split * pairs / num_splits * kPairBlocks);
  }
  // Whether both requests have the same splits, but for the last one's end.
  KILN_FN bool equal_but_for_the_end(const RequestCut& x) const {
    if (num_splits != x.num_splits || divisible != x.divisible) return false;
    bool equal = first_block == x.first_block;
    for (int split = 1; split < num_splits; ++split) equal &= begin(split) == x.begin(split);
    return equal;
  }
};

constexpr int kFanBits = 5, kFanIn = 1 << kFanBits;  // partial results merged at once

// Number of splits of a request: one for each `blocks` KV blocks, up to `few`. Beyond that it
// doubles while each split keeps `longer` times `blocks` blocks, up to `most`. `most` items of one
// KV head fill the GPU; it is below 32768, its product with a request's blocks below 2^31, and it
// also limits the splits of all tiles together. So a power-of-two number of equally long divisible
// requests nearly fills the GPU if together they have `most` * `blocks` blocks. A block has
// 2^warp_bits warps.
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

// First pair of blocks of a split's unit i. A share begins with its first unit.
KILN_FN int unit_begin(int i, int num_pairs, int warp_bits) {
  return i * num_pairs >> 2 * warp_bits;
}
// How often a split was halved to get such an item.
KILN_FN int halvings_of(Part kind) { return max(0, int(kind) - int(Part::split_in_units)); }
// log2 of the number of parts under a first-level tree node: the parts of eight splits of a
// divisible request, however they are cut; kFanIn parts of any other.
KILN_FN int node_bits_of(Part kind) {
  return kind == Part::split ? kFanBits : 3 + halvings_of(kind);
}
// Units of its item that a warp has, and the first of them, counted in the split.
KILN_FN int units_of_warp(Part kind, int warp_bits) { return 1 << (warp_bits - halvings_of(kind)); }
KILN_FN int first_unit(Part kind, int part, int warp, int warp_bits) {
  const int halvings = halvings_of(kind), own = part & ((1 << halvings) - 1);
  return (own << (2 * warp_bits - halvings)) + warp * units_of_warp(kind, warp_bits);
}

KILN_FN RequestCut cut_request(int num_tokens, int seq_len, int group, int window, SplitRule rule) {
  RequestCut x;
  x.first_block = first_visible(seq_len - num_tokens + 1, window) / kKVBlock;
  x.num_blocks = (seq_len + kKVBlock - 1) / kKVBlock - x.first_block;
  x.num_tiles = num_tokens <= kMostTokens ? (num_tokens * group + kTileRows - 1) / kTileRows : 0;
  const int most = max(1, rule.most / max(1, x.num_tiles));
  x.num_splits = max(1, min(rule.splits(x.num_blocks), most));
  // Divisible: at most 8 rows, so that a warp has registers for three results; at least a pair of
  // blocks for each unit; and one tree node, or whole nodes of eight splits.
  const int shares = x.num_splits << rule.warp_bits;
  x.divisible = num_tokens * group <= kTileRows / 2 &&
                (x.num_splits <= 8 || x.num_splits % 8 == 0) &&
                x.num_blocks >= (shares << rule.warp_bits) * kPairBlocks;
  return x;
}

}  // namespace kiln
