// How a request's prefill attention is cut into tiles of rows: the rule of the plan and the kernel.
// A tile belongs to one request, and its shape is a constant.
#pragma once
#include "kiln/attention/split.cuh"

namespace kiln {

constexpr int kPrefillRows = 128;  // (token, head of the group) rows of a tile

// One tile's work for one KV head. Tables of them begin with one whose `request` counts the rest.
struct alignas(16) TileItem {
  int request, tile;
  int begin, end;  // blocks of the request's keys, of which some row sees one
};

struct PrefillRequest {
  int first_token, num_tokens, seq_len, num_tiles;  // num_tiles 0: there is nothing to do here

  KILN_FN static PrefillRequest load(int r, const int* seq_lens, const int* cu_seqlens_q,
                                     int group) {
    PrefillRequest x;
    x.first_token = cu_seqlens_q[r];
    x.num_tokens = cu_seqlens_q[r + 1] - x.first_token;
    x.seq_len = seq_lens[r];
    const bool served = x.num_tokens > kMostTokens;
    x.num_tiles = served ? (x.num_tokens * group + kPrefillRows - 1) / kPrefillRows : 0;
    return x;
  }
  // Row r of all tiles is head r % group of token r / group, which sees the keys before limit.
  KILN_FN int limit(int token) const { return seq_len - num_tokens + token + 1; }
  KILN_FN int end_block(int tile, int group) const {
    const int last = min(num_tokens - 1, (tile * kPrefillRows + kPrefillRows - 1) / group);
    return (max(0, limit(last)) + kKVBlock - 1) / kKVBlock;
  }
  KILN_FN int begin_block(int tile, int group, int window) const {
    return window ? max(0, limit(tile * kPrefillRows / group) - window) / kKVBlock : 0;
  }
};

// Which rows a warp has: of a request's rows those from `first` on.
struct WarpRows {
  int first, count, group;
  int64_t token;  // of all, the request's first
  int head;       // of all, the group's first

  KILN_FN int64_t token_of(int row) const { return token + (first + row) / group; }
  KILN_FN int head_of(int row) const { return head + (first + row) % group; }
};

}  // namespace kiln
