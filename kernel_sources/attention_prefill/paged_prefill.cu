// out[t, h, :] = v_scale sum_j softmax_j(cap(scale q[t, h, :] . k_j)) v_j, j the keys that t sees
//
// out, query: [num_tokens, num_heads, head_dim]; pools: blocks of 16 tokens, rows dense, any other
// strides; items: prefill_plan's. scale > 0. head_dim: a multiple of 16 up to HEAD_TILE. Query,
// pools and out start every row at a multiple of 16 bytes. counter: 0 before and after.
// Compile-time parameters: SCALAR_T, KV_T, HEAD_TILE, SOFT_CAP
// (jit_kernels/ops/attention_prefill.py).
//
// A block takes 128 rows (token, head of the group) of one request at a time, its warps 32 each (16
// where registers are short), and goes over the keys in tiles of 64 that all warps share, while the
// next one is on its way. Blocks take items as they come free, heaviest first: the bits of a row do
// not depend on which block computed it, nor on any other request.
#include "kiln/attention_softmax.cuh"
#include "kiln/attention_tiles.cuh"
#include "kiln/ptx_async.cuh"
#include "kiln/ptx_fp8.cuh"
#include "kiln/ptx_launch.cuh"
#include "kiln/ptx_memory.cuh"
#include "kiln/ptx_mma.cuh"
#include "kiln/reduce.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef KV_T
#define KV_T SCALAR_T
#endif
#ifndef HEAD_TILE
#define HEAD_TILE 128
#endif
#ifndef SOFT_CAP  // whether there is one: code that is never run slows the loop down by 4 %
#define SOFT_CAP false
#endif

namespace {

constexpr uint32_t kWarp = 0xffffffffu;
using kiln::kLog2e, kiln::kLn2;
constexpr int kBlock = kiln::kKVBlock, kRows = kiln::kPrefillRows;
constexpr int kParts = HEAD_TILE <= 128 ? 2 : 1;  // tiles of 16 rows of a warp: each key read from
constexpr int kWarps = kRows / (16 * kParts);    // shared memory serves all of them
constexpr int kThreads = kWarps * 32;
constexpr int kKeys = 64, kBlocks = kKeys / kBlock;  // keys of a tile
constexpr int kSteps = HEAD_TILE / 16;
constexpr bool kFp8 = sizeof(KV_T) == 1;
// Rows of shared memory lie an odd number of 16-byte chunks apart: the eight that ldmatrix reads at
// once are in different banks.
constexpr int kChunks = HEAD_TILE / 8, kStep = (kChunks | 1) * 16;  // bytes
constexpr int kTile = kKeys * kStep;                               // of keys or of values
// What cp.async brings; KV_T of one byte has a stage of its own, which becomes a tile of SCALAR_T.
constexpr int kRawChunks = HEAD_TILE * int(sizeof(KV_T)) / 16;
constexpr int kRawStep = kFp8 ? (kRawChunks | 1) * 16 : kStep, kRawTile = kKeys * kRawStep;
// Shared memory: queries, then kStages tiles of keys and one of values, then, with KV_T of one
// byte, what is to become them. Within the 99 KiB of the smallest GPUs up to HEAD_TILE 128.
constexpr int kStages = kFp8 || HEAD_TILE > 128 ? 1 : 2;

using Parts = float[kParts][2];

// A tile of the pool is copied in turns. kEven: a thread has the same 16 bytes of a row in all of
// them, and its rows lie evenly in the blocks.
constexpr int kTurns = (kKeys * kRawChunks + kThreads - 1) / kThreads;
static_assert(kThreads % kRawChunks == 0 && 32 % kRawChunks == 0);
constexpr bool kEven = kBlock % (kThreads / kRawChunks) == 0;
constexpr int kAhead = 32;  // blocks of keys of which a warp knows the addresses

// What a warp knows of its item, in shared memory: registers are short.
struct Known {
  const KV_T *keys[kAhead], *values[kAhead];  // blocks of the KV head
  const KV_T *key_pool, *value_pool;          // the KV head of block 0
  const int* table;                           // the request's blocks that matter
  int num_blocks;                             // of the request, those that matter
  int num_keys[32];  // too; 0 for a lane that copies columns past head_dim: zeros come instead
  int work;                                   // which item of which KV head
  int first, last;                            // limits of the warp's first and last row
  int limits[16 * kParts];                    // a row sees the keys before it
  float norms[16 * kParts];
};

struct alignas(16) Words4 { uint32_t v[4]; };

// s = queries times a tile of keys. queries: the warp's rows.
KILN_FN void multiply_keys(float (&s)[kParts][kKeys / 8][4], const unsigned char* queries,
                           const unsigned char* keys, int lane) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kParts][4], b[4];
#pragma unroll
    for (int m = 0; m < kParts; ++m)
      kiln::ldmatrix_x4(a[m], queries + (m * 16 + lane % 16) * kStep + (2 * k + lane / 16) * 16);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const int row = n * 16 + lane % 8 + lane / 16 * 8;
      kiln::ldmatrix_x4(b, keys + row * kStep + (2 * k + lane / 8 % 2) * 16);
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        kiln::mma_m16n8k16<SCALAR_T>(s[m][2 * n], a[m], b[0], b[1]);
        kiln::mma_m16n8k16<SCALAR_T>(s[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// o += p times a tile of values.
KILN_FN void add_values(float (&o)[kParts][HEAD_TILE / 8][4],
                        const float (&p)[kParts][kKeys / 8][4], const unsigned char* values,
                        int lane) {
#pragma unroll
  for (int n = 0; n < kKeys / 16; ++n) {
    uint32_t a[kParts][4], b[4];
#pragma unroll
    for (int m = 0; m < kParts; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = p[m][2 * n + i / 2] + i % 2 * 2;
        a[m][i] = kiln::pack<SCALAR_T>(pair[0], pair[1]);
      }
#pragma unroll
    for (int c = 0; c < kSteps; ++c) {
      kiln::ldmatrix_x4_trans(b, values + (n * 16 + lane % 16) * kStep + (2 * c + lane / 16) * 16);
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        kiln::mma_m16n8k16<SCALAR_T>(o[m][2 * c], a[m], b[0], b[1]);
        kiln::mma_m16n8k16<SCALAR_T>(o[m][2 * c + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// A tile of KV_T of one byte as SCALAR_T; the whole block.
KILN_FN void widen(unsigned char* to, const unsigned char* raw) {
  for (int i = threadIdx.x; i < kKeys * kRawChunks; i += kThreads) {
    const int row = i / kRawChunks, chunk = i % kRawChunks;
    const Words4 bytes = kiln::load_vector<Words4>(raw + row * kRawStep + chunk * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Words4 wide;
      kiln::unpack_e4m3<SCALAR_T>(bytes.v[2 * half], wide.v[0], wide.v[1]);
      kiln::unpack_e4m3<SCALAR_T>(bytes.v[2 * half + 1], wide.v[2], wide.v[3]);
      kiln::store_vector(to + row * kStep + (2 * chunk + half) * 16, wide);
    }
  }
}

// Normalise a warp's rows and store them by way of the queries' place. norms: the warp's own.
KILN_FN void finish(SCALAR_T* out, float* lse, const float* sinks, float v_scale, int num_heads,
                    int head_dim, const kiln::WarpRows& rows, unsigned char* place,
                    float (&norms)[16 * kParts],
                    const float (&o)[kParts][HEAD_TILE / 8][4], const Parts& top, const Parts& sum) {
  const int lane = threadIdx.x % 32, quad = lane / 4;
  float all = 0, best = 0;  // of row `lane`
#pragma unroll
  for (int m = 0; m < kParts; ++m)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float total = kiln::quad_sum(sum[m][j]);
      const float s = __shfl_sync(kWarp, total, lane % 8 * 4);
      const float t = __shfl_sync(kWarp, top[m][j], lane % 8 * 4);
      if (lane / 8 == 2 * m + j) all = s, best = t;
    }
  if (lane < 16 * kParts) {
    float f = v_scale;
    if (sinks && lane < rows.count) {  // one more logit, without a value
      const float sink = sinks[rows.head_of(lane)] * kLog2e, high = fmaxf(best, sink);
      const float less = kiln::exp2_fast(best - high);
      all = all * less + kiln::exp2_fast(sink - high);
      best = high;
      f *= less;
    }
    norms[lane] = all > 0 ? kiln::div_rn(f, all) : 0.0f;  // without a key: zero, and -infinity
    if (lse && lane < rows.count)
      lse[rows.token_of(lane) * num_heads + rows.head_of(lane)] =
          all > 0 ? (best + kiln::log2_fast(all)) * kLn2 : best;
  }
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kParts; ++m)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = m * 16 + quad + 8 * j;
      const float f = norms[row];
#pragma unroll
      for (int c = 0; c < HEAD_TILE / 8; ++c) {
        const uint32_t pair = kiln::pack<SCALAR_T>(o[m][c][2 * j] * f, o[m][c][2 * j + 1] * f);
        kiln::store_vector(place + row * kStep + c * 16 + lane % 4 * 4, pair);
      }
    }
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < rows.count * kChunks; i += 32) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (chunk * 8 >= head_dim) continue;
    const int64_t to = rows.token_of(row) * num_heads + rows.head_of(row);
    kiln::store_vector(out + to * head_dim + chunk * 8,
                       kiln::load_vector<Words4>(place + row * kStep + chunk * 16));
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, HEAD_TILE <= 128 ? 2 : 1)
paged_prefill(SCALAR_T* out, float* lse, const SCALAR_T* query, const KV_T* key_pool,
              const KV_T* value_pool, const int* block_table, const int* seq_lens,
              const int* cu_seqlens_q, const kiln::TileItem* items, uint32_t* counter,
              const float* sinks, int64_t query_token, int64_t query_head, int64_t key_block,
              int64_t key_head, int64_t key_token, int64_t value_block, int64_t value_head,
              int64_t value_token, int64_t table_row, int num_heads, int num_kv_heads, int head_dim,
              int window, float scale, float soft_cap, float v_scale) {
  kiln::pdl_wait();
  __shared__ int next_work[2];
  __shared__ Known of_warp[kWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane / 4;
  const int group = num_heads / num_kv_heads;
  Known& known = of_warp[warp];
  unsigned char* tiles = kiln::dynamic_shared() + kRows * kStep;
  unsigned char* queries = kiln::dynamic_shared() + warp * 16 * kParts * kStep;  // the warp's own
  unsigned char* values = tiles + kStages * kTile;
  unsigned char* raw_keys = kFp8 ? values + kTile : tiles;
  unsigned char* raw_values = kFp8 ? raw_keys + kRawTile : values;
  const int within = window ? window : 0x40000000;  // keys that a row sees

  // A block's first work is its own number. For each piece of work that it does it asks for another
  // one, so that as many numbers are taken as there is work: then the counter is 0 again.
  auto num_work = [&] { return items[0].request * num_kv_heads; };  // anew: registers are short
  auto take = [&] { return int(gridDim.x + kiln::arrive(counter, num_work() - 1)); };
  auto rows_of = [&](int work) {  // asked for twice, likewise
    const kiln::TileItem item = kiln::load_vector<kiln::TileItem>(items + 1 + work / num_kv_heads);
    const int token = cu_seqlens_q[item.request], all = cu_seqlens_q[item.request + 1] - token;
    const int first = item.tile * kRows + warp * 16 * kParts;
    const int count = min(16 * kParts, all * group - first);
    return kiln::WarpRows{first, count, group, token, work % num_kv_heads * group};
  };
  for (int turn = 0, work = blockIdx.x; work < num_work(); work = next_work[turn]) {
    turn ^= 1;
    const int kv_head = work % num_kv_heads;
    const kiln::TileItem item = kiln::load_vector<kiln::TileItem>(items + 1 + work / num_kv_heads);
    const int* table = block_table + item.request * table_row + item.begin;
    const int num_blocks = item.end - item.begin, count = (num_blocks + kBlocks - 1) / kBlocks;
    int ahead = lane < num_blocks ? table[lane] : 0;  // see next_blocks
    auto x = kiln::PrefillRequest::load(item.request, seq_lens, cu_seqlens_q, group);
    x.seq_len -= item.begin * kBlock;  // from here on keys count from the first that matters
    const kiln::WarpRows rows = rows_of(work);
    // A row sees the keys before its limit, `within` of them at most; limits rise from row to row.
    // One of padding sees none: then no tile goes without a mask.
    if (lane < 16 * kParts) {
      const int limit = lane < rows.count ? x.limit((rows.first + lane) / group) : 0;
      known.limits[lane] = limit;
      if (lane == 0) known.first = rows.count < 16 * kParts ? 0 : limit;
      if (lane == max(rows.count, 1) - 1) known.last = limit;
    }
    const bool inside = lane % kRawChunks * (16 / int(sizeof(KV_T))) < head_dim;
    known.num_keys[lane] = inside ? min(x.seq_len, num_blocks * kBlock) : 0;
    if (lane == 0) {
      known.key_pool = key_pool + kv_head * key_head;
      known.value_pool = value_pool + kv_head * value_head;
      known.table = table;
      known.num_blocks = num_blocks;
      known.work = work;
    }

    // A lane looks up one of the next 32 blocks, and those after are on their way in `ahead`.
    auto next_blocks = [&](int i) {  // before the copies of the keys of tile i
      if (i * kBlocks % kAhead == 0) {
        const int64_t id = ahead;
        __syncwarp();  // nobody reads the last ones any more, and the above is known
        known.keys[lane] = known.key_pool + id * key_block;
        known.values[lane] = known.value_pool + id * value_block;
        const int next = i * kBlocks + kAhead + lane;
        ahead = next < known.num_blocks ? known.table[next] : 0;
        __syncwarp();
      }
    };
    auto fetch = [&](int i, unsigned char* to, const KV_T* const* pool, int64_t token) {
      const int valid = known.num_keys[lane] - i * kKeys;  // what is past it is never read
      pool += i * kBlocks % kAhead;
      if constexpr (kEven) {
        constexpr int kAtOnce = kThreads / kRawChunks;
        const int low = threadIdx.x / kRawChunks, column = threadIdx.x % kRawChunks;
        const int64_t own = low * token + column * (16 / int(sizeof(KV_T))), step = kAtOnce * token;
        to += low * kRawStep + column * 16;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const KV_T* from = pool[b] + own;
#pragma unroll
          for (int row = b * kBlock; row < (b + 1) * kBlock; row += kAtOnce, from += step)
            kiln::copy_async_16(to + row * kRawStep, from, row + low < valid);
        }
      } else {
#pragma unroll 2
        for (int turn = 0; turn < kTurns; ++turn) {
          const int c = threadIdx.x + turn * kThreads;
          const int row = c / kRawChunks, column = c % kRawChunks;
          if (kKeys * kRawChunks % kThreads && row >= kKeys) continue;
          kiln::copy_async_16(to + row * kRawStep + column * 16,
                              pool[row / kBlock] + row % kBlock * token +
                                  column * (16 / int(sizeof(KV_T))), row < valid);
        }
      }
    };
    auto fetch_keys = [&](int i) {
      next_blocks(i);
      fetch(i, raw_keys + i % kStages * kRawTile, known.keys, key_token);
    };
    auto fetch_values = [&](int i) {  // of the keys fetched last: the addresses are theirs
      fetch(i, raw_values, known.values, value_token);
    };

#pragma unroll 1
    for (int i = lane; i < 16 * kParts * kChunks; i += 32) {
      const int row = i / kChunks, chunk = i % kChunks;
      const SCALAR_T* from =
          query + rows.token_of(row) * query_token + rows.head_of(row) * query_head + chunk * 8;
      kiln::copy_async_16(queries + row * kStep + chunk * 16, from,
                          row < rows.count && chunk * 8 < head_dim);
    }
    if (count > 0) {
      fetch_keys(0);
      if (kFp8) fetch_values(0);
    }
    kiln::copy_commit();
    if (threadIdx.x == 0) next_work[turn] = take();

    float o[kParts][HEAD_TILE / 8][4] = {};
    Parts top, sum = {};
#pragma unroll
    for (int m = 0; m < kParts; ++m) top[m][0] = top[m][1] = kiln::minus_infinity();

    for (int i = 0; i < count; ++i) {
      kiln::copy_wait<0>();
      __syncthreads();  // the keys of tile i are complete, and every warp is done with tile i - 1
      if constexpr (kFp8) {
        widen(tiles, raw_keys);
        widen(values, raw_values);
        __syncthreads();  // the tile is there, and where it came from is free
        if (i + 1 < count) {
          fetch_keys(i + 1);
          fetch_values(i + 1);
        }
        kiln::copy_commit();
      } else {
        fetch_values(i);
        kiln::copy_commit();
        if constexpr (kStages == 2) {
          if (i + 1 < count) fetch_keys(i + 1);
          kiln::copy_commit();
        }
      }

      const int key = i * kKeys;
      const int first = known.first, last = known.last;
      const bool seen = key < last && key + kKeys > first - within;  // by a row of the warp
      float s[kParts][kKeys / 8][4] = {};
      if (seen) {
        multiply_keys(s, queries, tiles + i % kStages * kTile, lane);
        if (SOFT_CAP) kiln::cap_logits(s, soft_cap, scale);
        if (key < last - within || key + kKeys > first) {
#pragma unroll
          for (int m = 0; m < kParts; ++m)
#pragma unroll
            for (int j = 0; j < 2; ++j) {  // this lane holds parts of rows quad and quad + 8
              const int end = known.limits[m * 16 + quad + 8 * j];
              kiln::hide_keys(s[m], j, end - key - lane % 4 * 2, within);
            }
        }
        kiln::soften(s, o, top, sum, SOFT_CAP ? 1.0f : scale * kLog2e);
      }
      if constexpr (!kFp8) {
        kiln::copy_wait<kStages - 1>();
        __syncthreads();  // the values are there, and every warp is done with the keys
        if constexpr (kStages == 1) {
          if (i + 1 < count) fetch_keys(i + 1);
          kiln::copy_commit();
        }
      }
      if (seen) add_values(o, s, values, lane);
    }

    kiln::copy_wait<0>();  // without keys the queries are still on their way, to where results go
    __syncwarp();
    finish(out, lse, sinks, v_scale, num_heads, head_dim, rows_of(known.work), queries, known.norms,
           o, top, sum);
    __syncthreads();  // every warp is done with the tiles, and the next item is known
  }
}
