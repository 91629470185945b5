// out[t, h, :] = v_scale sum_j softmax_j(cap(scale q[t, h, :] . k_j)) v_j, j: keys visible to t
// out, query: [num_tokens, num_heads, head_dim]; pools: blocks of 16 tokens, rows dense, any other
// strides; items: from prefill_plan. scale > 0. head_dim: a multiple of 16 up to HEAD_TILE. Rows of
// query, pools and out start at multiples of 16 bytes. counter: 0 before and after. Compile-time
// parameters: SCALAR_T, KV_T, HEAD_TILE, SOFT_CAP (jit_kernels/ops/attention_prefill/spec.py).
// Work split: a block takes 128 rows (token, head of the group) of one request and KV head at a
// time, each warp 32 of them (16 if registers are short). Blocks take items from an atomic counter,
// heaviest first. A row's bits depend neither on its block nor on other requests.
// Memory: all warps share tiles of 64 keys. cp.async copies the next tile while one is multiplied;
// two block barriers per tile separate its copies from its reads.
#include "attention_prefill/prefill.cuh"
#include "kiln/ptx/fp8.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef KV_T
#define KV_T SCALAR_T
#endif
#ifndef HEAD_TILE
#define HEAD_TILE 128
#endif
#ifndef SOFT_CAP  // whether to cap: code that never runs slows the loop down by 4 %
#define SOFT_CAP false
#endif

namespace {

using kiln::kLog2e;
struct Core {
  // Tiles of 16 rows in a warp: each key read from shared memory serves all of them.
  static constexpr int kParts = HEAD_TILE <= 128 ? 2 : 1;
  static constexpr int kThreads = kiln::kPrefillRows / (16 * kParts) * 32;
  static constexpr int kHeadTile = HEAD_TILE, kKeys = 64;  // keys of a tile
  static constexpr int kSteps = HEAD_TILE / 16;
  static constexpr bool kFp8 = sizeof(KV_T) == 1;
  // The row pitch is an odd number of 16-byte chunks, so the eight rows that ldmatrix reads at once
  // fall in different banks.
  static constexpr int kChunks = HEAD_TILE / 8, kStep = (kChunks | 1) * 16;  // bytes
  static constexpr int kTile = kKeys * kStep;  // of keys or of values
  // Layout that cp.async fills. One-byte KV has its own stage, which widen() converts to SCALAR_T.
  static constexpr int kRawChunks = HEAD_TILE * int(sizeof(KV_T)) / 16;
  static constexpr int kRawStep = kFp8 ? (kRawChunks | 1) * 16 : kStep;
  static constexpr int kRawTile = kKeys * kRawStep;
  // Shared memory: queries, kStages tiles of keys, one of values; for one-byte KV also the raw
  // tiles. It fits in the 99 KiB of the smallest GPUs up to HEAD_TILE 128.
  static constexpr int kStages = kFp8 || HEAD_TILE > 128 ? 1 : 2;

  KILN_FN static unsigned char* queries() { return kiln::dynamic_shared(); }
  KILN_FN static int query_place(int row, int chunk) { return row * kStep + chunk * 16; }
  KILN_FN static int key_place(int row, int chunk) { return row * kRawStep + chunk * 16; }

  // s += queries times a tile of keys. queries: the warp's rows.
  KILN_FN static void multiply_keys(float (&s)[kParts][kKeys / 8][4], const unsigned char* queries,
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
  KILN_FN static void add_values(float (&o)[kParts][HEAD_TILE / 8][4],
                                 const float (&p)[kParts][kKeys / 8][4],
                                 const unsigned char* values, int lane) {
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
        kiln::ldmatrix_x4_trans(b, values + (n * 16 + lane % 16) * kStep +
                                       (2 * c + lane / 16) * 16);
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          kiln::mma_m16n8k16<SCALAR_T>(o[m][2 * c], a[m], b[0], b[1]);
          kiln::mma_m16n8k16<SCALAR_T>(o[m][2 * c + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  // Convert a tile of one-byte KV to SCALAR_T; the whole block takes part.
  KILN_FN static void widen(unsigned char* to, const unsigned char* raw) {
    for (int i = threadIdx.x; i < kKeys * kRawChunks; i += kThreads) {
      const int row = i / kRawChunks, chunk = i % kRawChunks;
      const kiln::Words4 bytes = kiln::load_vector<kiln::Words4>(raw + row * kRawStep + chunk * 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        kiln::Words4 wide;
        kiln::unpack_e4m3<SCALAR_T>(bytes.v[2 * half], wide.v[0], wide.v[1]);
        kiln::unpack_e4m3<SCALAR_T>(bytes.v[2 * half + 1], wide.v[2], wide.v[3]);
        kiln::store_vector(to + row * kStep + (2 * chunk + half) * 16, wide);
      }
    }
  }

  template <class X, class STATE, class K, class V, class B>
  KILN_FN static void attend(kiln::PrefillRows<kParts, HEAD_TILE>& sums, const X& x,
                             const STATE& state, int count, K fetch_keys, V fetch_values,
                             B begun) {
    const int lane = threadIdx.x % 32;
    unsigned char* tiles = kiln::dynamic_shared() + kiln::kPrefillRows * kStep;
    unsigned char* queries = kiln::dynamic_shared() + threadIdx.x / 32 * 16 * kParts * kStep;
    unsigned char* values = tiles + kStages * kTile;
    unsigned char* raw_keys = kFp8 ? values + kTile : tiles;
    unsigned char* raw_values = kFp8 ? raw_keys + kRawTile : values;
    if (count > 0) {
      fetch_keys(0, raw_keys);
      if (kFp8) fetch_values(0, raw_values);
    }
    kiln::copy_commit();
    begun();
    for (int i = 0; i < count; ++i) {
      kiln::copy_wait<0>();
      __syncthreads();  // the keys of tile i are loaded, and every warp is done with tile i - 1
      if constexpr (kFp8) {
        widen(tiles, raw_keys);
        widen(values, raw_values);
        __syncthreads();  // the tile is there, and the raw tile is free
        if (i + 1 < count) {
          fetch_keys(i + 1, raw_keys + (i + 1) % kStages * kRawTile);
          fetch_values(i + 1, raw_values);
        }
        kiln::copy_commit();
      } else {
        fetch_values(i, raw_values);
        kiln::copy_commit();
        if constexpr (kStages == 2) {
          if (i + 1 < count) fetch_keys(i + 1, raw_keys + (i + 1) % kStages * kRawTile);
          kiln::copy_commit();
        }
      }

      const int key = i * kKeys;
      const auto seen = kiln::load_vector<kiln::VisibleKeys>(&state.visible);
      const bool visible = key < seen.end && key + kKeys > seen.begin;  // to a row of the warp
      float s[kParts][kKeys / 8][4] = {};
      if (visible) {
        multiply_keys(s, queries, tiles + i % kStages * kTile, lane);
        if (SOFT_CAP) kiln::cap_logits(s, x.soft_cap, x.scale);
        kiln::apply_mask(s, state, seen, key);
        const float scale = SOFT_CAP ? 1.0f : x.scale * kLog2e;
#pragma unroll
        for (int m = 0; m < kParts; ++m) {
          float f[2];
          if (kiln::update_row_max<SCALAR_T>(s[m], sums.top[m], sums.sum[m], f, scale))
            kiln::rescale(sums.o[m], f);
          kiln::exp_and_sum(s[m], sums.top[m], sums.sum[m], scale);
        }
      }
      if constexpr (!kFp8) {
        kiln::copy_wait<kStages - 1>();
        __syncthreads();  // the values are there, and every warp is done with the keys
        if constexpr (kStages == 1) {
          if (i + 1 < count) fetch_keys(i + 1, raw_keys + (i + 1) % kStages * kRawTile);
          kiln::copy_commit();
        }
      }
      if (visible) add_values(sums.o, s, values, lane);
    }
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Core::kThreads, HEAD_TILE <= 128 ? 2 : 1)
paged_prefill(SCALAR_T* out, float* lse, const SCALAR_T* query, const KV_T* key_pool,
              const KV_T* value_pool, const int* block_table, const int* seq_lens,
              const int* cu_seqlens_q, const kiln::TileItem* items, uint32_t* counter,
              const float* sinks, int64_t query_token, int64_t query_head, int64_t key_block,
              int64_t key_head, int64_t key_token, int64_t value_block, int64_t value_head,
              int64_t value_token, int64_t table_row, int num_heads, int num_kv_heads, int head_dim,
              int window, float qk_scale, float soft_cap, float v_scale) {
  kiln::pdl_wait();
  kiln::prefill<Core, SCALAR_T, KV_T>({
      out, lse, query, key_pool, value_pool, block_table, seq_lens, cu_seqlens_q, items, counter,
      sinks, query_token, query_head, key_block, key_head, key_token, value_block, value_head,
      value_token, table_row, num_heads, num_kv_heads, head_dim, window, qk_scale, soft_cap,
      v_scale});
}
