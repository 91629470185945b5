// out[t, h, :] = v_scale sum_j softmax_j(scale q[t, h, :] . k_j) v_j, j: keys visible to t
// out, query: [num_tokens, num_heads, head_dim]; pools: blocks of 16 SCALAR_T tokens, rows dense,
// any other strides; items: from prefill_plan. scale > 0; no soft_cap. head_dim: a multiple of 16
// up to HEAD_TILE. Rows of query, pools and out start at multiples of 16 bytes. counter: 0 before
// and after. Compile-time parameters: SCALAR_T, HEAD_TILE (ops/attention_prefill/spec.py).
// Work split: as paged_prefill, but for sm_90a: two warpgroups of 64 rows each, and tiles of 128
// keys.
// Memory: two tiles of keys and two of values, filled by cp.async. wgmma multiplies the keys of
// tile i and the values of tile i - 1 while the threads copy the next tiles and compute the weights
// of tile i. The one block barrier per tile is in next_tiles.
#include "attention_prefill/prefill.cuh"
#include "kiln/ptx/wgmma.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef HEAD_TILE
#define HEAD_TILE 128
#endif

namespace {

struct Core {
  static constexpr int kParts = 1, kThreads = 256, kHeadTile = HEAD_TILE, kKeys = 128;
  // Shared memory: the queries, two tiles of keys, two of values, all in panels of 64 columns.
  static constexpr int kRows = kiln::kPrefillRows, kTile = kKeys * HEAD_TILE * 2;
  static constexpr int kQueryPanel = kRows * 128, kPanel = kKeys * 128;
  using Sums = kiln::PrefillRows<kParts, HEAD_TILE>;

  KILN_FN static unsigned char* queries() { return kiln::panel_begin(kiln::dynamic_shared()); }
  KILN_FN static int query_place(int row, int chunk) {
    return chunk / 8 * kQueryPanel + kiln::swizzled(row, chunk);
  }
  KILN_FN static int key_place(int row, int chunk) {
    return chunk / 8 * kPanel + kiln::swizzled(row, chunk);
  }

  // s = queries times a tile of keys. queries: the warpgroup's rows in the first panel.
  KILN_FN static void multiply_keys(float (&s)[kKeys / 8][4], const unsigned char* queries,
                                    const unsigned char* keys) {
#pragma unroll
    for (int k = 0; k < HEAD_TILE / 16; ++k) {
      const auto a = kiln::panel(queries + k / 4 * kQueryPanel + k % 4 * 32);
      const auto b = kiln::panel(keys + k / 4 * kPanel + k % 4 * 32);
      if (k == 0) kiln::wgmma<SCALAR_T, false>(s, a, b);
      else kiln::wgmma<SCALAR_T, true>(s, a, b);
    }
    kiln::wgmma_commit();
  }
  // o += p times a tile of values.
  KILN_FN static void add_values(Sums& sums, const uint32_t (&p)[kKeys / 16][4],
                                 const unsigned char* values) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
      kiln::wgmma_transposed<SCALAR_T>(sums.o[0], p[n],
                                       kiln::panel(values + n * 16 * 128, kPanel));
    kiln::wgmma_commit();
  }
  KILN_FN static void pack(uint32_t (&p)[kKeys / 16][4], const float (&s)[kKeys / 8][4]) {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = s[2 * n + i / 2] + i % 2 * 2;
        p[n][i] = kiln::pack<SCALAR_T>(pair[0], pair[1]);
      }
  }

  template <class X, class STATE, class K, class V, class B>
  KILN_FN static void attend(Sums& sums, const X& x, const STATE& state, int count,
                             K fetch_keys, V fetch_values, B begun) {
    unsigned char* tiles = queries() + kRows * HEAD_TILE * 2;
    const unsigned char* own_queries = queries() + threadIdx.x / 128 * 64 * 128;
    const float scale = x.scale * kiln::kLog2e;
    auto keys = [&](int i) { return tiles + i % 2 * kTile; };
    auto values = [&](int i) { return tiles + (2 + i % 2) * kTile; };
    // Wait until the tiles in flight are loaded and every warp is done with the ones before.
    auto next_tiles = [&] {
      kiln::copy_wait<0>();
      kiln::publish_to_wgmma();
      __syncthreads();
      kiln::wgmma_fence();
    };
    float s[1][kKeys / 8][4], f[2];
    uint32_t p[kKeys / 16][4];
    auto find_weights = [&](int i) {
      kiln::apply_mask(s, state, kiln::load_vector<kiln::VisibleKeys>(&state.visible), i * kKeys);
      const bool rises = kiln::update_row_max<SCALAR_T>(s[0], sums.top[0], sums.sum[0], f, scale);
      kiln::exp_and_sum(s[0], sums.top[0], sums.sum[0], scale);
      return rises;
    };

    if (count > 0) fetch_keys(0, keys(0));
    kiln::copy_commit();
    begun();
    if (count == 0) return;
    next_tiles();
    multiply_keys(s[0], own_queries, keys(0));
    fetch_values(0, values(0));
    if (count > 1) fetch_keys(1, keys(1));
    kiln::copy_commit();
    kiln::wgmma_wait<0>();
    find_weights(0);
    pack(p, s[0]);
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      next_tiles();
      multiply_keys(s[0], own_queries, keys(i));
      add_values(sums, p, values(i - 1));
      fetch_values(i, values(i));
      if (i + 1 < count) fetch_keys(i + 1, keys(i + 1));
      kiln::copy_commit();
      kiln::wgmma_wait<1>();
      const bool rises = find_weights(i);
      kiln::wgmma_wait<0>();
      if (rises) kiln::rescale(sums.o[0], f);
      pack(p, s[0]);
    }
    next_tiles();
    add_values(sums, p, values(count - 1));
    kiln::wgmma_wait<0>();
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(Core::kThreads, 1)
paged_prefill_wgmma(SCALAR_T* out, float* lse, const SCALAR_T* query, const SCALAR_T* key_pool,
                    const SCALAR_T* value_pool, const int* block_table, const int* seq_lens,
                    const int* cu_seqlens_q, const kiln::TileItem* items, uint32_t* counter,
                    const float* sinks, int64_t query_token, int64_t query_head, int64_t key_block,
                    int64_t key_head, int64_t key_token, int64_t value_block, int64_t value_head,
                    int64_t value_token, int64_t table_row, int num_heads, int num_kv_heads,
                    int head_dim, int window, float qk_scale, float soft_cap, float v_scale) {
  kiln::pdl_wait();
  kiln::prefill<Core, SCALAR_T, SCALAR_T>({
      out, lse, query, key_pool, value_pool, block_table, seq_lens, cu_seqlens_q, items, counter,
      sinks, query_token, query_head, key_block, key_head, key_token, value_block, value_head,
      value_token, table_row, num_heads, num_kv_heads, head_dim, window, qk_scale, soft_cap,
      v_scale});
}
