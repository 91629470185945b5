// residual[t] += sum over ranks of x[t];  out[t] = rms_norm(residual[t]) * (weight_offset + weight)
// x, residual (in place), out: [ranks, rows, d], a matrix for each rank of this launch; weight: [d].
// Any d, any alignment, dense matrices, any stride between ranks. The same bits
// as one_shot_push, then fused_add_rms_norm: the sum over ranks is rounded to SCALAR_T, and so is
// the new residual. Compile-time parameters: SCALAR_T, MAX_WORLD
// (jit_kernels/ops/all_reduce/spec.py).
//
// Work split: blockIdx.y is a rank, whose blocks divide the rows of t. One team of threads a row
// (kiln/rows/rows.cuh). A block first sends all its rows to all ranks.
//
// Memory: all_reduce/slots.cuh; in a slot every row starts with a new vector. While a block waits
// for the kernel ahead it prefetches the weight and its first row of the residual.
//
// Callers: as for one_shot_push.cu. After a rank was late, residual is undefined too.
#include "all_reduce/slots.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/rms.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef MAX_WORLD
#define MAX_WORLD 8
#endif

namespace {
using T = SCALAR_T;
using Slots = kiln::Slots<T, MAX_WORLD>;
using Source = kiln::RmsRows<T, true>;
using Chunk = kiln::Chunk<T>;
constexpr int kHeldChunks = 2048;  // of the widest row that threads hold
}  // namespace

extern "C" __global__ void __launch_bounds__(1024)
fused_all_reduce_add_rms_norm(T* out, T* residual, const T* x, const T* weight, uint8_t* buffers,
                              const int64_t* peers, uint32_t* record, int64_t rows, int64_t d,
                              int64_t out_stride, int64_t residual_stride, int64_t x_stride,
                              int64_t buffer_bytes, int64_t push_at, int64_t slot_bytes, int world,
                              int first_rank, int limit_ms, float inverse_d, float eps,
                              float weight_offset, int once) {
  kiln::pdl_hints_first();
  __shared__ kiln::Partial<float> partial;
  __shared__ Chunk sums[kHeldChunks];  // each thread reads what it has written itself
  x += blockIdx.y * x_stride;
  out += blockIdx.y * out_stride;
  residual += blockIdx.y * residual_stride;
  const uint32_t odd = kiln::misalignment_of(out, d) | kiln::misalignment_of(residual) |
                       kiln::misalignment_of(weight);
  const bool held = odd % 16 == 0 && d <= kHeldChunks * Chunk::kSize &&
                    d <= Source::kChunks * int64_t(kiln::team_span<T>());
  const Source source{held ? reinterpret_cast<const T*>(sums) : out, held ? 0 : d, residual,
                      d, weight, inverse_d, eps, weight_offset, once != 0, partial};
  const kiln::StoreRows<T> sink{out, d};
  if (blockIdx.x < rows) kiln::hint_part<T, 2>(residual + blockIdx.x * d, uint32_t(d));
  kiln::hint_part<T, 2>(weight, uint32_t(d));
  kiln::pdl_wait_then_trigger();

  const kiln::Group group(buffers, buffer_bytes, peers, record, first_rank, world);
  kiln::Call call(group, kiln::Kind::push);
  kiln::Watchdog watchdog(limit_ms);
  const Slots slots(group, call, watchdog, push_at, slot_bytes);
  const int width = int((d + Chunk::kSize - 1) / Chunk::kSize);  // vectors of a row
  const auto outboxes = slots.outboxes();
  const bool live = !__syncthreads_or(!call.live);
  if (live)
#pragma unroll 1
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
      const kiln::Input<T> own(x + int64_t(row) * d, d);
      for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const Chunk v = kiln::sendable(own.load(i));
#pragma unroll
        for (int rank = 0; rank < MAX_WORLD; ++rank)
          if (slots.is_other(rank)) Slots::send(outboxes.of[rank], row * width + i, v);
      }
    }

#pragma unroll 1
  for (int row = blockIdx.x; live && row < rows; row += gridDim.x) {
    const kiln::Input<T> own(x + int64_t(row) * d, d);
    const kiln::Message<T> unheld(out + int64_t(row) * d, d);
#pragma unroll 1
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
      Chunk* const place = sums + (held ? i : int(threadIdx.x));
      kiln::store_vector(place, own.load(i));
      const Chunk sum = slots.receive_sum(place, row * width + i);
      if (held) kiln::store_vector(place, sum);
      else unheld.store(i, sum);
    }
    if (held) {
      const uint32_t size = uint32_t(d);
      const bool narrow = size <= kiln::team_span<T>();
      sink.write(row, size, source.held_row(row, size, narrow, source.load(row, size)));
    } else {
      kiln::run_general(source, sink, uint32_t(row), d);
    }
    __syncthreads();  // `partial` has been read
  }
  call.end(group, watchdog, kiln::Algorithm::fused, rows * d * int64_t(sizeof(T)));
}
