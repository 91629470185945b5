// out[i] = x_0[i] + x_1[i] + ... over the ranks, in float32, in their order, rounded once
// x, out: [ranks, n], a row for each rank that this launch runs, any n, any alignment, any row
// stride. x is not written. Every algorithm, rank and size gives the same bits. Compile-time
// parameters: SCALAR_T, MAX_WORLD (jit_kernels/ops/all_reduce/spec.py).
//
// Work split: blockIdx.y is a rank. Its threads divide the vectors of 16 bytes; a thread sends its
// vectors to all ranks, then receives the same ones from all ranks and adds them up.
//
// Memory: a vector is written to a slot in the buffer of each other rank and needs no flag
// (all_reduce/slots.cuh). So a message takes one way between two GPUs.
//
// Callers: all ranks make the same calls in the same order, each in one stream, with the same grid
// for all calls of the group. They have exchanged data before the first call, after clearing their
// buffers (Layout.clear). The blocks of all ranks run at the same time. A rank that waits longer
// than limit_ms writes the record; then `out` is undefined, and the group is unusable.
#include "all_reduce/slots.cuh"
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef MAX_WORLD
#define MAX_WORLD 8
#endif

extern "C" __global__ void __launch_bounds__(512, 1)
one_shot_push(SCALAR_T* out, const SCALAR_T* x, uint8_t* buffers, const int64_t* peers,
              uint32_t* record, int64_t n, int64_t out_stride, int64_t x_stride,
              int64_t buffer_bytes, int64_t push_at, int64_t slot_bytes, int world, int first_rank,
              int limit_ms) {
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
    for (int i = first; i < count; i += step) {
      const auto v = kiln::sendable(own.load(i));
#pragma unroll
      for (int rank = 0; rank < MAX_WORLD; ++rank)
        if (slots.is_other(rank)) Slots::send(outboxes.of[rank], i, v);
    }

#pragma unroll 1
  for (int i = first; i < count; i += Slots::kBatch * step) {
    uint32_t v[Slots::kAll][4], wanted = 0;
#pragma unroll
    for (int b = 0; b < Slots::kBatch; ++b)
      if (i + b * step < count) wanted |= slots.with_own(v + b * MAX_WORLD, own.load(i + b * step))
                                          << b * MAX_WORLD;
    if (!slots.receive(v, wanted, i, step)) break;
#pragma unroll
    for (int b = 0; b < Slots::kBatch; ++b)
      if (i + b * step < count)
        result.store(i + b * step, kiln::sum_ranks<SCALAR_T, MAX_WORLD>(v + b * MAX_WORLD, world));
  }
  call.end(group, watchdog, kiln::Algorithm::one_shot_push, n * int64_t(sizeof(SCALAR_T)));
}
