// h[t, c] = sum_i x[t, i] * A[c, i] for each column c below the sum of the ranks of t's adapter
// x: [tokens, input_size], any row stride; h: [tokens, width] float32, width >= that sum
//
// sorted_token_ids: [chunks * CHUNK]. The tokens of a chunk have one adapter. A chunk that is not
// full ends with padding, which is `tokens` or more. chunk_slots: [chunks], the adapter slot of
// each chunk, negative for a chunk without tokens. rank_table, a_table: [num_parts, num_slots]; an
// offset in a_table counts elements of adapter_pool, where A [rank, input_size] begins.
// Compile-time parameters (jit_kernels/ops/lora_chunked/spec.py): SCALAR_T, CHUNK.
// Work split: a block computes kColumns columns of h for one chunk, on tensor cores, or for float32
// with FMA. Its warps take the steps of an input row in turn. So only input_size sets the order of
// the additions. Blocks without a chunk or a column exit at once.
// Memory: rows of x and A are loaded into registers. A lane loads the same 8 elements of each, so
// that no shuffle is needed. Block barriers separate the sums of the warps from the one that adds
// them.
// Callers: columns of h without a rank keep their values, as do rows without an adapter.
#include "kiln/ptx/launch.cuh"
#include "lora_chunked/chunk.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef CHUNK
#define CHUNK 16
#endif

namespace {

using kiln::Words;
constexpr bool kMma = sizeof(SCALAR_T) == 2;
constexpr int kTiles = CHUNK / 16;             // of 16 tokens
constexpr int kGroups = CHUNK == 16 ? 1 : 2;   // of 8 columns
constexpr int kColumns = 8 * kGroups, kMostWarps = 16;
constexpr int kStep = kMma ? 32 : 4;           // elements of a row that a warp takes at once
constexpr int kOwn = kMma ? 1 : 2;             // columns of a group whose elements a lane loads
constexpr int kAhead = CHUNK == 16 ? 4 : 1;    // steps whose loads are in flight together

// The sums of 16 tokens and 8 columns, which grow by one step. low, high: of tokens g and g + 8.
template <class T>
KILN_FN void add_step(float (&sum)[4], const Words& low, const Words& high,
                      const Words (&a)[kOwn]) {
  if constexpr (kMma) {
    // The lane gives the same elements of x and A to each mma, so their order does not matter.
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32_t x[4] = {low.v[j], high.v[j], low.v[j + 1], high.v[j + 1]};
      kiln::mma_m16n8k16<T>(sum, x, a[0].v[j], a[0].v[j + 1]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const uint32_t x = s / 2 ? high.v[j] : low.v[j];
        sum[s] = kiln::fma_rn(kiln::as_float(x), kiln::as_float(a[s % kOwn].v[j]), sum[s]);
      }
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1)
lora_chunked_shrink(float* h, const SCALAR_T* x, const SCALAR_T* adapter_pool,
                    const int32_t* sorted_token_ids, const int32_t* chunk_slots,
                    const int32_t* rank_table, const int64_t* a_table, int64_t tokens,
                    int64_t x_stride, int64_t h_stride, int input_size, int num_parts,
                    int num_slots) {
  kiln::pdl_wait_then_trigger();
  __shared__ float partial[kMostWarps][16][kColumns];
  const int slot = chunk_slots[blockIdx.x];
  if (slot < 0) return;
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4, first = int(blockIdx.y) * kColumns;

  const kiln::Chunk chunk{sorted_token_ids + int64_t(blockIdx.x) * CHUNK, tokens};
  const int tiles = chunk.num_tiles(kTiles);
  const SCALAR_T* own[kTiles][2];  // the rows of x of tokens g and g + 8 of each tile
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = tile * 16 + half * 8 + g;
      own[tile][half] = chunk.has(place) ? x + chunk.token(place) * x_stride : nullptr;
    }

  const SCALAR_T* a[kGroups][kOwn] = {};  // the rows of A that this lane loads
  int end = 0;
  for (int part = 0; part < num_parts; ++part) {
    const int at = part * num_slots + slot;
    const int rank = rank_table[at];
    if (end < first + kColumns && first < end + rank) {
      const SCALAR_T* own = adapter_pool + a_table[at];
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < kOwn; ++j) {
          const int row = first + 8 * n + (kMma ? g : 2 * t + j) - end;
          if (row >= 0 && row < rank) a[n][j] = own + int64_t(row) * input_size;
        }
    }
    end += rank;
  }
  const int count = min(end - first, kColumns);
  if (count <= 0) return;

  float sum[kTiles][kGroups][4] = {};
  const int turn = warps * kStep;
  for (int begin = warp * kStep; begin < input_size; begin += kAhead * turn) {
    Words xs[kAhead][kTiles][2], as[kAhead][kGroups][kOwn];
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const int i = begin + s * turn + (kMma ? 8 * t : 0);
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < kOwn; ++j) as[s][n][j] = kiln::part_of_row(a[n][j], i, input_size);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          xs[s][tile][half] = kiln::part_of_row(own[tile][half], i, input_size);
    }
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      if (begin + s * turn >= input_size) break;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile >= tiles) break;
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
          add_step<SCALAR_T>(sum[tile][n], xs[s][tile][0], xs[s][tile][1], as[s][n]);
      }
    }
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    if (tile >= tiles) break;
    if (tile) __syncthreads();  // the sums before have been read
#pragma unroll
    for (int n = 0; n < kGroups; ++n)
#pragma unroll
      for (int s = 0; s < 4; ++s)
        partial[warp][g + s / 2 * 8][n * 8 + 2 * t + s % 2] = sum[tile][n][s];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * kColumns; i += blockDim.x) {
      const int row = i / kColumns, column = i % kColumns, place = tile * 16 + row;
      if (column >= count || !chunk.has(place)) continue;
      float total = partial[0][row][column];
      for (int w = 1; w < warps; ++w) total = kiln::add_rn(total, partial[w][row][column]);
      h[chunk.token(place) * h_stride + first + column] = total;
    }
  }
}
