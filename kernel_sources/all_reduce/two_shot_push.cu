// out[i] = x_0[i] + x_1[i] + ... over the ranks, in float32, in their order, rounded once
// x, out: [ranks, n], a row for each rank that this launch runs, any n, any alignment, any row
// stride. x is not written. The same bits as one_shot_push, for less traffic and twice the latency.
// Compile-time parameters: SCALAR_T, MAX_WORLD (jit_kernels/ops/all_reduce/spec.py).
//
// Work split: blockIdx.y is a rank. Rank r owns shard r, the r-th `shard` vectors of 16 bytes. Each
// thread sends its vectors of every shard to the owner, adds up those of its own rank's shard,
// sends the sums to all ranks, and receives the sums of the other shards.
//
// Memory: all data goes through slots and needs no flag (all_reduce/slots.cuh). The first `shard`
// vectors of a slot hold what is to be added, the next ones hold sums.
//
// Callers: as for one_shot_push.cu.
#include "all_reduce/slots.cuh"
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef MAX_WORLD
#define MAX_WORLD 8
#endif

extern "C" __global__ void __launch_bounds__(512, 1)
two_shot_push(SCALAR_T* out, const SCALAR_T* x, uint8_t* buffers, const int64_t* peers,
              uint32_t* record, int64_t n, int64_t out_stride, int64_t x_stride,
              int64_t buffer_bytes, int64_t push_at, int64_t slot_bytes, int shard, int world,
              int first_rank, int limit_ms) {
  kiln::pdl_wait_then_trigger();
  using Slots = kiln::Slots<SCALAR_T, MAX_WORLD>;
  const kiln::Group group(buffers, buffer_bytes, peers, record, first_rank, world);
  kiln::Call call(group, kiln::Kind::push);
  kiln::Watchdog watchdog(limit_ms);
  const Slots slots(group, call, watchdog, push_at, slot_bytes);
  const kiln::Input<SCALAR_T> own(x + blockIdx.y * x_stride, n);
  const kiln::Message<SCALAR_T> result(out + blockIdx.y * out_stride, n);
  const int count = own.size, step = int(gridDim.x * blockDim.x);
  const int first = int(blockIdx.x * blockDim.x + threadIdx.x);

  const auto outboxes = slots.outboxes();
  if (call.live)
    for (int i = first; i < shard; i += step)
#pragma unroll
      for (int owner = 0; owner < MAX_WORLD; ++owner)
        if (slots.is_other(owner) && owner * shard + i < count)
          Slots::send(outboxes.of[owner], i, kiln::sendable(own.load(owner * shard + i)));

  const int begin = group.rank * shard, size = min(shard, count - begin);
#pragma unroll 1
  for (int i = first; i < size; i += Slots::kBatch * step) {
    uint32_t v[Slots::kAll][4], wanted = 0;
#pragma unroll
    for (int b = 0; b < Slots::kBatch; ++b)
      if (i + b * step < size)
        wanted |= slots.with_own(v + b * MAX_WORLD, own.load(begin + i + b * step))
                  << b * MAX_WORLD;
    if (!slots.receive(v, wanted, i, step)) break;
#pragma unroll
    for (int b = 0; b < Slots::kBatch; ++b) {
      const int at = i + b * step;
      if (at >= size) continue;
      const auto sum = kiln::sum_ranks<SCALAR_T, MAX_WORLD>(v + b * MAX_WORLD, world);
      result.store(begin + at, sum);
#pragma unroll
      for (int rank = 0; rank < MAX_WORLD; ++rank)  // no sum looks unsent
        if (slots.is_other(rank)) Slots::send(outboxes.of[rank], shard + at, sum);
    }
  }

#pragma unroll 1
  for (int i = first; i < shard; i += Slots::kBatch * step) {
    uint32_t v[Slots::kAll][4], wanted = 0;
#pragma unroll
    for (int place = 0; place < Slots::kAll; ++place) {
      const int owner = place % MAX_WORLD;
      const int at = i + place / MAX_WORLD * step;
      if (slots.is_other(owner) && at < shard && owner * shard + at < count) wanted |= 1u << place;
    }
    if (!slots.receive(v, wanted, shard + i, step)) break;
#pragma unroll
    for (int place = 0; place < Slots::kAll; ++place) {
      if (!(wanted >> place & 1)) continue;
      const int at = place % MAX_WORLD * shard + i + place / MAX_WORLD * step;
      result.store(at, kiln::Chunk<SCALAR_T>{v[place][0], v[place][1], v[place][2], v[place][3]});
    }
  }
  call.end(group, watchdog, kiln::Algorithm::two_shot_push, n * int64_t(sizeof(SCALAR_T)));
}
