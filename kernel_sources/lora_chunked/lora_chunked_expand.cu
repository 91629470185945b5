// out[t, start_p + o] += scale_p * sum_k h[t, first_p + k] * B_p[k, o] for each part p of a site
// out: [tokens, outputs], in place, any row stride; h: [tokens, width] float32, from the shrink
//
// start_p, the first output of part p, is where the part before it ends: 0, end0 or end1.
// first_p is the sum of the ranks of the parts before p. sorted_token_ids, chunk_slots and the
// tables are those of lora_chunked_shrink; scale_table has the scales, b_table the offsets of B
// [rank, outputs of p]. Each sum is rounded once, when it is added. Compile-time parameters
// (jit_kernels/ops/lora_chunked/spec.py): SCALAR_T, CHUNK.
// Work split: a block adds to kBlockColumns columns of one part for one chunk, each warp to some of
// them for 16 tokens. For tensor cores each element of h is split into the sum of two numbers of
// B's dtype, which keeps at least 16 bits of it. float32 uses FMA. Blocks behind the last part exit
// at once.
// Memory: cp.async brings kDepth rows of B to shared memory at a time, between two block barriers.
// Callers: a row of out has one token.
#include "kiln/math/reduce.cuh"
#include "kiln/ptx/async.cuh"
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
constexpr int kSize = kiln::Vec<SCALAR_T>::kSize, kWarps = 4, kRowWarps = CHUNK / 16;
constexpr int kBlockColumns = 128, kColumns = kBlockColumns / (kWarps / kRowWarps);  // of a warp
constexpr int kGroups = kColumns / 8, kDepth = 64;
// The pitch of B in shared memory is an odd number of 16-byte chunks, so the eight rows that
// ldmatrix reads at once fall in different banks.
constexpr int kChunks = kBlockColumns / kSize, kPitch = kChunks + 1;

template <class T> constexpr bool kNarrow = false;  // whether its range is smaller than float32's
template <> constexpr bool kNarrow<kiln::fp16> = true;

// What a warp multiplies: two rows of h for each lane, and the block's columns of B.
struct Work {
  const float* h[2];  // of tokens g and g + 8 of the warp; null for padding
  const SCALAR_T* b;  // the block's first column
  int rank, size;     // size: columns of the part, the pitch of B
  int left;           // columns of the part from the block's first on
  bool aligned;       // rows of B start at multiples of 16 bytes

  KILN_FN float own(int half, int k) const { return h[half] && k < rank ? h[half][k] : 0.0f; }
};

// The range of fp16 is smaller than float32's. So before a row of h is split it is multiplied by
// `by`, the power of two that brings its largest element between 1 and 2. The sums are multiplied
// by `back`, which is 1 / by.
struct RowScale {
  float by = 1.0f, back = 1.0f;

  KILN_FN RowScale(const Work& work, int half, int t) {
    if constexpr (kNarrow<SCALAR_T>) {
      float most = 0.0f;
      for (int k = t; k < work.rank; k += 4) most = fmaxf(most, fabsf(work.own(half, k)));
      const uint32_t exponent = kiln::as_uint(kiln::quad_max(most)) >> 23;
      if (exponent == 0 || exponent > 253) return;
      by = kiln::as_float((254 - exponent) << 23);
      back = kiln::as_float(exponent << 23);
    }
  }
};

// 16 ranks of h as the operands of an mma, before they are split.
struct Ranks {
  float v[4][2];

  KILN_FN void load(const Work& work, int k, const RowScale (&scale)[2], int t) {
#pragma unroll
    for (int r = 0; r < 4; ++r)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        v[r][j] = kiln::mul_rn(work.own(r % 2, k + 2 * t + r / 2 * 8 + j), scale[r % 2].by);
  }
  // Split v into high + low. What the sum lacks of v is smaller than the last bit of low.
  template <class T> KILN_FN void split(uint32_t (&high)[4], uint32_t (&low)[4]) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      high[r] = kiln::pack<T>(v[r][0], v[r][1]);
      low[r] = kiln::pack<T>(
          kiln::sub_rn(v[r][0], kiln::to_float(T{uint16_t(high[r])})),
          kiln::sub_rn(v[r][1], kiln::to_float(T{uint16_t(high[r] >> 16)})));
    }
  }
};

// Copy the rows k0 .. k0 + depth - 1 of B to shared memory; rows and columns that B does not have
// become zeros.
KILN_FN void copy_b(Words (&tile)[kDepth][kPitch], const Work& work, int k0, int depth) {
  for (int i = threadIdx.x; i < depth * kChunks; i += 32 * kWarps) {
    const int row = i / kChunks, chunk = i % kChunks, left = work.left - chunk * kSize;
    const bool valid = k0 + row < work.rank && left > 0;
    const SCALAR_T* from = work.b + int64_t(k0 + row) * work.size + chunk * kSize;
    if (work.aligned) kiln::copy_async_16(&tile[row][chunk], from, valid);
    else kiln::store_vector(&tile[row][chunk], valid ? kiln::elements_of(from, left) : Words{});
  }
  kiln::copy_commit();
}

// sum += h B for 16 tokens and the warp's columns.
template <class T>
KILN_FN void multiply(float (&sum)[kGroups][4], const Work& work, const RowScale (&scale)[2],
                      int first, int lane) {
  const int t = lane % 4;
  if constexpr (sizeof(T) == 2) {
    __shared__ Words tile[kDepth][kPitch];
    Ranks own;
    own.load(work, 0, scale, t);
    for (int k0 = 0; k0 < work.rank; k0 += kDepth) {
      const int depth = min((work.rank - k0 + 15) / 16 * 16, kDepth);
      if (k0) __syncthreads();  // all warps are done with the rows before
      copy_b(tile, work, k0, depth);
      kiln::copy_wait<0>();
      __syncthreads();
      for (int k = 0; k < depth; k += 16) {
        uint32_t high[4], low[4], b[4];
        own.split<T>(high, low);
        own.load(work, k0 + k + 16, scale, t);
#pragma unroll
        for (int n = 0; n < kGroups; n += 2) {
          kiln::ldmatrix_x4_trans(b, &tile[k + lane % 16][first / 8 + n + lane / 16]);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            kiln::mma_m16n8k16<T>(sum[n + m], low, b[2 * m], b[2 * m + 1]);
            kiln::mma_m16n8k16<T>(sum[n + m], high, b[2 * m], b[2 * m + 1]);
          }
        }
      }
    }
  } else {
    for (int k = 0; k < work.rank; ++k) {
      const float own[2] = {work.own(0, k), work.own(1, k)};
#pragma unroll
      for (int n = 0; n < kGroups; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = first + n * 8 + 2 * t + j;
          float b = 0.0f;
          if (column < work.left) b = kiln::to_float(work.b[int64_t(k) * work.size + column]);
#pragma unroll
          for (int half = 0; half < 2; ++half)
            sum[n][half * 2 + j] = kiln::fma_rn(own[half], b, sum[n][half * 2 + j]);
        }
    }
  }
}

// Add four numbers to a row, of which `left` exist.
KILN_FN void add_to(SCALAR_T* row, const float (&more)[4], int left, bool vectors) {
  using Four = kiln::Vec<SCALAR_T, 4>;
  if (vectors) {
    Four y = Four::load(row);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      kiln::from_float(kiln::add_rn(kiln::to_float(y.v[j]), more[j]), y.v[j]);
    y.store(row);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (j < left) kiln::from_float(kiln::add_rn(kiln::to_float(row[j]), more[j]), row[j]);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kWarps, 4)
lora_chunked_expand(SCALAR_T* out, const float* h, const SCALAR_T* adapter_pool,
                    const int32_t* sorted_token_ids, const int32_t* chunk_slots,
                    const int32_t* rank_table, const float* scale_table, const int64_t* b_table,
                    int64_t tokens, int64_t out_stride, int64_t h_stride, int end0, int end1,
                    int outputs, int num_parts, int num_slots) {
  kiln::pdl_wait_then_trigger();
  const int slot = chunk_slots[blockIdx.x];
  if (slot < 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int place = warp % kRowWarps * 16 + g;
  const int32_t* ids = sorted_token_ids + int64_t(blockIdx.x) * CHUNK;
  const int64_t token[2] = {ids[place], ids[place + 8]};
  int block = blockIdx.y, part = 0, start = 0, size = 0, at = 0, before = 0;  // this block's place
  for (; part < num_parts; ++part) {
    start += size;
    size = (part == 0 ? end0 : part == 1 ? end1 : outputs) - start;
    at = part * num_slots + slot;
    const int blocks = (size + kBlockColumns - 1) / kBlockColumns;
    if (block < blocks) break;
    block -= blocks;
    before += rank_table[at];  // columns of h
  }
  if (part == num_parts) return;
  const int rank = rank_table[at];
  if (rank == 0) return;

  const int base = block * kBlockColumns, first = warp / kRowWarps * kColumns;
  const SCALAR_T* b = adapter_pool + b_table[at];
  Work work{{}, b + base, rank, size, size - base,
            size % kSize == 0 && kiln::is_vector_aligned(b)};
  SCALAR_T* row[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (token[half] >= tokens) continue;  // padding
    work.h[half] = h + token[half] * h_stride + before;
    row[half] = out + token[half] * out_stride + start + base;
  }
  const RowScale scale[2] = {{work, 0, t}, {work, 1, t}};
  float sum[kGroups][4] = {};
  multiply<SCALAR_T>(sum, work, scale, first, lane);

  const float factor = scale_table[at];
  const bool vectors = size % 4 == 0 && out_stride % kSize == 0 &&
                       kiln::is_vector_aligned(out + start);
#pragma unroll
  for (int n = 0; n < kGroups; n += 2) {
    // Of 16 columns, lane 2i of a row gets four of the first 8, lane 2i + 1 of the others.
    const int column = first + (n + t % 2) * 8 + t / 2 * 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float more[4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float low = sum[n][half * 2 + j], high = sum[n + 1][half * 2 + j];
        const float other = __shfl_xor_sync(0xffffffffu, t % 2 ? low : high, 1);
        more[j] = t % 2 ? other : low;
        more[2 + j] = t % 2 ? high : other;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        more[j] = kiln::mul_rn(kiln::mul_rn(more[j], scale[half].back), factor);
      if (row[half] && column < work.left)
        add_to(row[half] + column, more, work.left - column, vectors);
    }
  }
}
