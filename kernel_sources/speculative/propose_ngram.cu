// Drafts of each row of a step, by lookup of its last tokens among its earlier ones. For the tokens
// h[0], .., h[last] of a row, h[last] sampled by this step, and i = 0 .. wanted-1:
//   drafts[row][i] = h[behind + i % (last + 1 - behind)];  num_drafts[row] = wanted
// h[behind - n .. behind - 1] are the last n tokens once more, with behind <= last, for the largest
// n of prompt_lookup_min .. prompt_lookup_max that has such a place; behind is the last such place.
// If there is none, behind = last, so that drafts repeat the newest token, and num_drafts[row] = 0.
//
// message: see kiln/step/message.cuh. seq_lens: [requests] int32, the length of each request in the
// step. rejected: [rows] int32, the drafts of each row that the step has rejected. sampled:
// [samples] int32, what it has sampled. token_pool: [num_slots], the token in each slot of the KV
// pool. tables: [rows, max_blocks], the KV blocks of each row. drafts: [rows, drafts_row] int32;
// num_drafts: [rows] int32. No compile-time parameters.
//
// Work split: one block per request, padding included. Each thread compares vectors of four tokens
// with the newest one, several vectors at once, from the end of the row to its start. It stops at
// the first match of full length, because all that it would still find are earlier.
// Memory: no block accesses the row of another. The best match of the block is the largest number
// whose high bits are the match's length and whose low bits are its place.
// Callers: 1 <= prompt_lookup_min <= prompt_lookup_max <= 31; a row has less than 2^27 tokens; it
// wants no more drafts than fit in its row of `drafts`.
#include "kiln/ptx/warp.cuh"
#include "kiln/rows/vec.cuh"
#include "kiln/step/message.cuh"

namespace {

constexpr int kMaxNgram = 31, kLengthAt = 27;  // a length's lowest bit in the number of a match
constexpr int kAtOnce = 4;                     // vectors of a thread in flight
using Tokens = kiln::Vec<int32_t>;

}  // namespace

extern "C" __global__ void __launch_bounds__(512)
propose_ngram(int32_t* drafts, int32_t* num_drafts, const int32_t* message, const int32_t* seq_lens,
              const int32_t* rejected, const int32_t* sampled, const int32_t* token_pool,
              const int32_t* tables, int64_t drafts_row, int64_t tables_row, int block_size,
              int prompt_lookup_max, int prompt_lookup_min) {
  kiln::pdl_wait_then_trigger();
  __shared__ int32_t suffix[kMaxNgram];  // from the newest token backwards
  __shared__ uint32_t found;
  const int thread = threadIdx.x, threads = blockDim.x, request = blockIdx.x;
  if (request >= message[0]) return;
  const kiln::Record& own = kiln::record_of(message, request);
  const int wanted = own.num_samples > 0 ? kiln::wanted_drafts(message, request) : 0;
  if (wanted == 0) {
    if (thread == 0) num_drafts[own.row] = 0;
    return;
  }
  const int32_t* blocks = tables + own.row * tables_row;
  const int wrong = rejected[own.row], last = seq_lens[request] - wrong;
  const int newest = sampled[own.sample + own.num_samples - 1 - wrong];
  auto slot_of = [&](int position) {
    return token_pool + int64_t(blocks[position / block_size]) * block_size + position % block_size;
  };
  if (thread == 0) found = 0;
  if (thread < prompt_lookup_max && thread <= last)
    suffix[thread] = thread == 0 ? newest : *slot_of(last - thread);
  __syncthreads();

  // Blocks whose size is no multiple of a vector are read token by token.
  const bool in_vectors = block_size % Tokens::kSize == 0 && kiln::is_vector_aligned(token_pool);
  const int size = in_vectors ? Tokens::kSize : 1;
  uint32_t best = 0;
  bool whole = false;
  for (int at = (last - 1) / size - thread; at >= 0 && !whole; at -= kAtOnce * threads) {
    const int32_t* slots[kAtOnce];  // all first, so that the blocks are looked up at the same time
    Tokens tokens[kAtOnce];
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) slots[v] = slot_of(max(at - v * threads, 0) * size);
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v) {
      if (in_vectors) tokens[v] = Tokens::load(slots[v]);
      else tokens[v].v[0] = *slots[v];
    }
    uint32_t equal = 0;  // later positions have higher bits
#pragma unroll
    for (int v = 0; v < kAtOnce; ++v)
#pragma unroll
      for (int i = 0; i < Tokens::kSize; ++i) {
        const bool is_earlier = i < size && (at - v * threads) * size + i < last;
        const bool same = at >= v * threads && is_earlier && tokens[v].v[i] == newest;
        equal |= uint32_t(same) << ((kAtOnce - 1 - v) * Tokens::kSize + i);
      }
    while (equal && !whole) {
      const int bit = 31 - __clz(int(equal)), v = kAtOnce - 1 - bit / Tokens::kSize;
      const int position = (at - v * threads) * size + bit % Tokens::kSize;
      equal ^= 1u << bit;
      int length = 1;
      while (length < prompt_lookup_max && length <= position &&
             *slot_of(position - length) == suffix[length])
        ++length;
      whole = length == prompt_lookup_max;
      if (length >= prompt_lookup_min)
        best = max(best, uint32_t(length) << kLengthAt | uint32_t(position + 1));
    }
  }
  best = kiln::warp_largest(best);
  if (thread % 32 == 0 && best) atomicMax(&found, best);
  __syncthreads();
  const int behind = found ? int(found & ((1u << kLengthAt) - 1)) : last;
#pragma unroll 1
  for (int i = thread; i < wanted; i += threads) {
    const int position = behind + i % (last + 1 - behind);
    drafts[own.row * drafts_row + i] = position == last ? newest : *slot_of(position);
  }
  if (thread == 0) num_drafts[own.row] = found ? wanted : 0;
}
