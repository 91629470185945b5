// sorted_token_ids = indices of ids [pairs] sorted by expert, each expert's run padded with `pairs`
//   to a multiple of block_size; expert_ids[b] = expert of block b; expert_ends[e] = end of e's
//   run; num_tokens_post_padded = end of the last run
//
// ids: [pairs] int32; ids outside 0 .. experts-1 are left out. sorted_token_ids: [capacity], room
// for all runs; the rest is filled with `pairs`. expert_ids: [blocks]; the rest is -1. The sort is
// stable, so every run gives the same result. At most 512 experts. No compile-time parameters.
// Work split: blocks of 512 threads. Each block counts all pairs, but places only those of its own
// experts, so blocks need not synchronise.
#include "kiln/ptx/ptx.cuh"
#include "kiln/ptx/launch.cuh"

namespace {

constexpr int kWarps = 16, kMaxExperts = 512, kExpertBits = 9, kAhead = 4;
constexpr uint32_t kAll = 0xffffffffu;

// The lanes with the same expert as this lane. Undefined if this lane's expert is out of range.
KILN_FN uint32_t peers_of(int expert, bool valid) {
  uint32_t peers = __ballot_sync(kAll, valid);
#pragma unroll
  for (int bit = 0; bit < kExpertBits; ++bit) {
    const uint32_t votes = __ballot_sync(kAll, expert >> bit & 1);
    peers &= expert >> bit & 1 ? votes : ~votes;
  }
  return peers;
}

// Inclusive prefix sum over the block. partial: shared memory, kWarps ints.
KILN_FN int sum_up_to(int x, int* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int other = __shfl_up_sync(kAll, x, step);
    if (lane >= step) x += other;
  }
  if (lane == 31) partial[warp] = x;
  __syncthreads();
  int before = lane < warp ? partial[lane] : 0;
#pragma unroll
  for (int m = 16; m; m >>= 1) before += __shfl_xor_sync(kAll, before, m);
  return before + x;
}

// A warp's own range of the pairs, in whole groups of 32. The ids of the next kAhead groups are
// prefetched while the warp processes one.
struct Stretch {
  const int32_t* ids;
  int end;
  int ahead[kAhead];

  KILN_FN Stretch(const int32_t* ids, int begin, int end) : ids(ids), end(end) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) ahead[k] = at(begin + 32 * k);
  }
  KILN_FN int at(int first) const {
    const int pair = first + int(threadIdx.x) % 32;
    return pair < end ? ids[pair] : -1;
  }
  KILN_FN int next(int first) {
    const int expert = ahead[0];
#pragma unroll
    for (int k = 1; k < kAhead; ++k) ahead[k - 1] = ahead[k];
    ahead[kAhead - 1] = at(first + 32 * kAhead);
    return expert;
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(512)
align_tokens(int32_t* sorted_token_ids, int32_t* expert_ids, int32_t* num_tokens_post_padded,
             int32_t* expert_ends, const int32_t* ids, int pairs, int experts, int block_size,
             int capacity, int blocks) {
  kiln::pdl_wait_then_trigger();
  __shared__ int places[kWarps * kMaxExperts];  // for each warp and expert: first a count
  __shared__ int first_block[kMaxExperts], end_block[kMaxExperts], filled[kMaxExperts];
  __shared__ int partial[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, thread = threadIdx.x;
  const int share = (experts + int(gridDim.x) - 1) / int(gridDim.x);
  const int first_own = blockIdx.x * share, end_own = min(first_own + share, experts);
  for (int i = thread; i < kWarps * experts; i += blockDim.x) places[i] = 0;
  __syncthreads();

  int* mine = places + warp * experts;
  const int each = (pairs + kWarps * 32 - 1) / (kWarps * 32) * 32;
  const int begin = warp * each, end = min(begin + each, pairs);
  Stretch counted(ids, begin, end);
#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const int expert = counted.next(first);
    if (expert >= 0 && expert < experts) atomicAdd(mine + expert, 1);
  }
  Stretch placed(ids, begin, end);
  __syncthreads();

  // Counts become offsets of the warps in each expert's run; the runs follow each other.
  int count = 0;
  if (thread < experts) {
    int own[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) own[w] = places[w * experts + thread];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      places[w * experts + thread] = count;
      count += own[w];
    }
  }
  const int run_blocks = (count + block_size - 1) / block_size;
  const int run_end = sum_up_to(run_blocks, partial);
  if (thread < experts) {
    first_block[thread] = run_end - run_blocks;
    filled[thread] = (run_end - run_blocks) * block_size + count;
    end_block[thread] = run_end;
    if (thread >= first_own && thread < end_own) expert_ends[thread] = run_end * block_size;
    if (thread == experts - 1 && blockIdx.x == 0) *num_tokens_post_padded = run_end * block_size;
  }
  __syncthreads();

#pragma unroll 1
  for (int first = begin; first < end; first += 32) {
    const int expert = placed.next(first);
    const bool valid = expert >= first_own && expert < end_own;
    if (!__any_sync(kAll, valid)) continue;
    const uint32_t peers = peers_of(expert, valid);
    const int before = valid ? mine[expert] : 0;
    __syncwarp();
    if (valid && lane == __ffs(peers) - 1) mine[expert] = before + __popc(peers);
    __syncwarp();
    const int rank = before + __popc(peers & ((1u << lane) - 1));
    if (valid) sorted_token_ids[first_block[expert] * block_size + rank] = first + lane;
  }
  const int own = lane * kWarps + warp;  // spread over warps: with few pairs most experts have none
  const bool of_block = own >= first_own && own < end_own;
  uint32_t used = __ballot_sync(kAll, of_block && first_block[own] < end_block[own]);
  for (; used; used &= used - 1) {
    const int expert = (__ffs(used) - 1) * kWarps + warp, last = end_block[expert];
    for (int at = filled[expert] + lane; at < last * block_size; at += 32)
      sorted_token_ids[at] = pairs;
    for (int b = first_block[expert] + lane; b < last; b += 32) expert_ids[b] = expert;
  }
  const int all = end_block[experts - 1], place = blockIdx.x * blockDim.x + thread;
  const int step = gridDim.x * blockDim.x;
  for (int at = all * block_size + place; at < capacity; at += step) sorted_token_ids[at] = pairs;
  for (int b = all + place; b < blocks; b += step) expert_ids[b] = -1;
}
