// out[i] = x_0[i] + x_1[i] + ... over the ranks, in float32, in their order, rounded once
// x, out: [ranks, n], a row for each rank that this launch runs, any n, any alignment, any row
// stride. x is not written. The same bits as one_shot_push, at the highest bandwidth. Compile-time
// parameters: SCALAR_T, MAX_WORLD (jit_kernels/ops/all_reduce/spec.py).
//
// Work split: blockIdx.y is a rank. Rank r owns shard r, the r-th `shard` vectors of 16 bytes. Each
// thread writes its vectors of every shard to the owner's area; after a barrier it adds up those of
// its own rank's shard; after another one it reads the sums of the other shards.
//
// Memory: all_reduce/areas.cuh. An area holds a shard from each rank, [world, shard], then their
// sum, [shard]. A rank's own part of its shard is not copied. No barrier is needed after the last
// reads: the next call uses another area, and its barriers show that all ranks are done with this
// one.
//
// Callers: as for one_shot_push.cu.
#include "all_reduce/areas.cuh"
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef MAX_WORLD
#define MAX_WORLD 8
#endif

extern "C" __global__ void __launch_bounds__(512, 1)
two_shot(SCALAR_T* out, const SCALAR_T* x, uint8_t* buffers, const int64_t* peers, uint32_t* record,
         int64_t n, int64_t out_stride, int64_t x_stride, int64_t buffer_bytes, int64_t flags_at,
         int64_t pull_at, int64_t area_bytes, int shard, int world, int first_rank,
         int limit_ms) {
  kiln::pdl_wait_then_trigger();
  using Areas = kiln::Areas<SCALAR_T, MAX_WORLD>;
  using Chunk = kiln::Chunk<SCALAR_T>;
  constexpr int kBatch = Areas::kBatch;
  const kiln::Group group(buffers, buffer_bytes, peers, record, first_rank, world);
  kiln::Call call(group, kiln::Kind::pull);
  kiln::Watchdog watchdog(limit_ms);
  const Areas areas(group, call, watchdog, flags_at, pull_at, area_bytes);
  const kiln::Input<SCALAR_T> own(x + blockIdx.y * x_stride, n);
  const kiln::Message<SCALAR_T> result(out + blockIdx.y * out_stride, n);
  const int count = own.size, step = int(gridDim.x * blockDim.x);
  const int begin = int(blockIdx.x * blockDim.x), first = begin + int(threadIdx.x);

  uint8_t* area[MAX_WORLD];
#pragma unroll
  for (int rank = 0; rank < MAX_WORLD; ++rank)
    if (kiln::has_rank<MAX_WORLD>(rank, world)) area[rank] = areas.area(rank);
  uint8_t* const mine = areas.own_area();

  // Copy vectors of the shards of other ranks, where `from` reads and `to` writes (rank, index).
  auto exchange = [&](auto from, auto to) {
#pragma unroll 1
    for (int i = first; i < shard; i += kBatch * step) {
      Chunk v[kBatch][MAX_WORLD];
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int rank = 0; rank < MAX_WORLD; ++rank) {
          const int at = i + b * step;
          if (areas.is_other(rank) && at < shard && rank * shard + at < count)
            v[b][rank] = from(rank, at);
        }
#pragma unroll
      for (int b = 0; b < kBatch; ++b)
#pragma unroll
        for (int rank = 0; rank < MAX_WORLD; ++rank) {
          const int at = i + b * step;
          if (areas.is_other(rank) && at < shard && rank * shard + at < count)
            to(rank, at, v[b][rank]);
        }
    }
  };

  if (call.live)
    exchange([&](int rank, int at) { return own.load(rank * shard + at); },
             [&](int rank, int at, const Chunk& v) {
               kiln::store_global(area[rank] + 16 * int64_t(group.rank * shard + at), v);
             });
  if (begin < shard && areas.barrier(1)) {
    const int owned = group.rank * shard, size = min(shard, count - owned);
#pragma unroll 1
    for (int i = first; i < size; i += step) {
      uint32_t v[MAX_WORLD][4];
#pragma unroll
      for (int rank = 0; rank < MAX_WORLD; ++rank) {
        if (!kiln::has_rank<MAX_WORLD>(rank, world)) continue;
        const Chunk x = rank == group.rank
                            ? own.load(owned + i)
                            : kiln::load_vector<Chunk>(mine + 16 * int64_t(rank * shard + i));
#pragma unroll
        for (int k = 0; k < 4; ++k) v[rank][k] = x.word[k];
      }
      const Chunk sum = kiln::sum_ranks<SCALAR_T, MAX_WORLD>(v, world);
      result.store(owned + i, sum);
      kiln::store_global(mine + 16 * int64_t(world * shard + i), sum);
    }
    if (areas.barrier(2))
      exchange(
          [&](int rank, int at) {
            return kiln::load_vector<Chunk>(area[rank] + 16 * int64_t(world * shard + at));
          },
          [&](int rank, int at, const Chunk& v) { result.store(rank * shard + at, v); });
  }
  call.end(group, watchdog, kiln::Algorithm::two_shot, n * int64_t(sizeof(SCALAR_T)));
}
