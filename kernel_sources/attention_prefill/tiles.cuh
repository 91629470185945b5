// Cuts a request's prefill attention into tiles of rows; the plan and the kernel share this rule. A
// tile belongs to one request, and its shape is a constant.
#pragma once
#include "kiln/attention/split.cuh"

namespace kiln {

constexpr int kPrefillRows = 128;  // (token, head of the group) rows of a tile

// One tile's work for one KV head. items[0] is a header: `request` is the number of items.
struct alignas(16) TileItem {
  int request, tile;
  int begin, end;  // KV blocks of the request that some row sees
};

struct PrefillRequest {
  int first_token, num_tokens, seq_len, num_tiles;  // num_tiles 0: not a prefill request

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
    return first_visible(limit(tile * kPrefillRows / group), window) / kKVBlock;
  }
};

// Rows of a warp: `count` of the request's rows, from `first` on.
struct WarpRows {
  int first, count, group;
  int64_t token;  // in the batch, of the request's first token
  int head;       // in the batch, of the group's first head

  KILN_FN int64_t token_of(int row) const { return token + (first + row) / group; }
  KILN_FN int head_of(int row) const { return head + (first + row) % group; }
};

}  // namespace kiln
