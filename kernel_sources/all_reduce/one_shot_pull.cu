// out[i] = x_0[i] + x_1[i] + ... over the ranks, in float32, in their order, rounded once
// x, out: [ranks, n], a row for each rank that this launch runs, any n, any alignment, any row
// stride. x is not written. The same bits as one_shot_push. Compile-time parameters: SCALAR_T,
// MAX_WORLD (jit_kernels/ops/all_reduce/spec.py).
//
// Work split: blockIdx.y is a rank. A thread copies its vectors of 16 bytes of x to its rank's own
// area; after a barrier it reads the same vectors of all ranks and adds them up.
//
// Memory: all_reduce/areas.cuh. No barrier follows the reads: the next call uses another area, and
// after its barrier all ranks have read this one.
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
one_shot_pull(SCALAR_T* out, const SCALAR_T* x, uint8_t* buffers, const int64_t* peers,
              uint32_t* record, int64_t n, int64_t out_stride, int64_t x_stride,
              int64_t buffer_bytes, int64_t flags_at, int64_t pull_at, int64_t area_bytes,
              int world, int first_rank, int limit_ms) {
  kiln::pdl_wait_then_trigger();
  using Areas = kiln::Areas<SCALAR_T, MAX_WORLD>;
  using Chunk = kiln::Chunk<SCALAR_T>;
  const kiln::Group group(buffers, buffer_bytes, peers, record, first_rank, world);
  kiln::Call call(group, kiln::Kind::pull);
  kiln::Watchdog watchdog(limit_ms);
  const Areas areas(group, call, watchdog, flags_at, pull_at, area_bytes);
  const kiln::Input<SCALAR_T> own(x + blockIdx.y * x_stride, n);
  const kiln::Message<SCALAR_T> result(out + blockIdx.y * out_stride, n);
  const int count = own.size, step = int(gridDim.x * blockDim.x);
  const int begin = int(blockIdx.x * blockDim.x), first = begin + int(threadIdx.x);

  if (call.live)
    for (int i = first; i < count; i += step)
      kiln::store_global(areas.own_area() + 16 * int64_t(i), own.load(i));
  if (begin < count && areas.barrier(1)) {
    const uint8_t* from[MAX_WORLD];
#pragma unroll
    for (int rank = 0; rank < MAX_WORLD; ++rank)
      if (kiln::has_rank<MAX_WORLD>(rank, world)) from[rank] = areas.area(rank);
#pragma unroll 1
    for (int i = first; i < count; i += Areas::kBatch * step) {
      uint32_t v[Areas::kBatch][MAX_WORLD][4];
#pragma unroll
      for (int b = 0; b < Areas::kBatch; ++b) {
        const int at = i + b * step;
        if (at >= count) continue;
#pragma unroll
        for (int rank = 0; rank < MAX_WORLD; ++rank) {
          if (!kiln::has_rank<MAX_WORLD>(rank, world)) continue;
          const auto x = kiln::load_vector<Chunk>(from[rank] + 16 * int64_t(at));
#pragma unroll
          for (int k = 0; k < 4; ++k) v[b][rank][k] = x.word[k];
        }
      }
#pragma unroll
      for (int b = 0; b < Areas::kBatch; ++b)
        if (i + b * step < count)
          result.store(i + b * step, kiln::sum_ranks<SCALAR_T, MAX_WORLD>(v[b], world));
    }
  }
  call.end(group, watchdog, kiln::Algorithm::one_shot_pull, n * int64_t(sizeof(SCALAR_T)));
}
