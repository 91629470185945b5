// out[t, h, :] = rope(norm(query));  key_pool[slot / B, h, slot % B, :] = rope(norm(key)) / k_scale
// value_pool: value / v_scale.  norm: rms_norm of a head if weights are given; rope: NeoX rotation
//
// query, out: [tokens, heads, head_dim]; key, value: [tokens, kv_heads, head_dim]; pools: [blocks,
// kv_heads, B, head_dim]; slot_mapping: [tokens] int64, -1 stores nothing; out may be query. All
// rows 16-byte aligned; head_dim, at most 256, and half are multiples of 8. half: rotary_dim / 2, or
// 0 for heads that are not rotated. An e4m3 pool holds x / scale, saturated; a SCALAR_T pool holds
// x. The same bits as rms_norm, apply_rotary and a copy.
// Work split: a team of threads, a power of two, for each head. Each thread has two chunks of 8
// elements: two that are rotated together, or two adjacent ones that are not rotated. threadIdx.y
// is the head, which saves a division. Compile-time parameters (jit_kernels/ops/kv/spec.py):
// SCALAR_T, KV_T.
#include "kiln/ptx/launch.cuh"
#include "kiln/rows/rotate.cuh"
#include "kiln/rows/vec.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif
#ifndef KV_T
#define KV_T SCALAR_T
#endif

namespace {

using Vector = kiln::Chunk<SCALAR_T>;
using Word = kiln::Word<SCALAR_T>;
constexpr int kChunk = 8;
constexpr int kVectors = kChunk / Vector::kSize;
constexpr uint32_t kWarp = 0xffffffffu;

struct Chunk {
  Vector part[kVectors];

  KILN_FN void load(const SCALAR_T* p) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) part[i] = Vector::load(p + i * Vector::kSize);
  }
  KILN_FN void store(SCALAR_T* p) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) part[i].store(p + i * Vector::kSize);
  }
};

KILN_FN void store_chunk(SCALAR_T* p, const Chunk& x, float) { x.store(p); }
// Not inlined: eight divisions take long to compile, and there would be two copies.
KILN_NOINLINE void store_chunk(kiln::e4m3* p, Chunk x, float scale) {
  kiln::Vec<kiln::e4m3, kChunk> bytes;
#pragma unroll
  for (int i = 0; i < kVectors * 4; ++i) {
    float y[Word::kSize];
    Word::unpack(x.part[i / 4].word[i % 4], y);
#pragma unroll
    for (int k = 0; k < Word::kSize; ++k)
      kiln::from_float(kiln::div_rn(y[k], scale), bytes.v[i * Word::kSize + k]);
  }
  bytes.store(p);
}

// The two chunks of a head that a thread of its team holds.
struct Place {
  int thread, team, chunks, pieces;  // chunks: of a head; pieces: of half the rotated dimensions
  bool rotated;
  int first, second;

  KILN_FN Place(int head_dim, int half)
      : thread(threadIdx.x), team(blockDim.x), chunks(head_dim / kChunk), pieces(half / kChunk) {
    rotated = thread < pieces;
    first = rotated ? thread : 2 * thread;
    second = rotated ? thread + pieces : 2 * thread + 1;
  }
  // Exchange the chunks' sums: thread i gets those of chunks i and i + team, as in rms_norm.
  KILN_FN void in_order(float& x, float& y) const {
    const float low = of(x, y, thread), high = of(x, y, thread + team);
    x = low, y = high;
  }

 private:
  KILN_FN float of(float x, float y, int chunk) const {
    const bool left = chunk < pieces, right = !left && chunk < 2 * pieces;
    const int owner = left ? chunk : right ? chunk - pieces : chunk / 2;
    const float a = __shfl_sync(kWarp, x, owner, team), b = __shfl_sync(kWarp, y, owner, team);
    return left || (!right && chunk % 2 == 0) ? a : b;
  }
};

KILN_FN float sum_of_squares(const Vector& x) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float y[Word::kSize];
    Word::unpack(x.word[i], y);
#pragma unroll
    for (int k = 0; k < Word::kSize; ++k) sum = kiln::fma_rn(y[k], y[k], sum);
  }
  return sum;
}

// The sum of squares of a head, in the order of rms_norm: over a thread's vectors, then a butterfly
// over the threads.
KILN_FN float sum_of_squares(const Chunk& a, const Chunk& b, const Place& place) {
  float sums[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float x = sum_of_squares(a.part[i]), y = sum_of_squares(b.part[i]);
    if (place.pieces != place.team) place.in_order(x, y);
    sums[i] = kiln::add_rn(x, y);
  }
  for (int m = place.team / 2; m; m >>= 1)
#pragma unroll
    for (int i = 0; i < kVectors; ++i)
      sums[i] = kiln::add_rn(sums[i], __shfl_xor_sync(kWarp, sums[i], m));
  return kVectors == 2 ? kiln::add_rn(sums[0], sums[kVectors - 1]) : sums[0];
}

KILN_FN void scale_word(uint32_t word, float scale, float (&y)[Word::kSize]) {
  Word::unpack(word, y);
#pragma unroll
  for (int k = 0; k < Word::kSize; ++k) y[k] = kiln::mul_rn(y[k], scale);
}
KILN_FN void scale_chunk(Chunk& x, const SCALAR_T* weight, float scale) {
  Chunk w;
  w.load(weight);
#pragma unroll
  for (int i = 0; i < kVectors * 4; ++i) {
    uint32_t& word = x.part[i / 4].word[i % 4];
    float y[Word::kSize];
    scale_word(word, scale, y);
    word = Word::product(Word::packed(y), w.part[i / 4].word[i % 4]);
  }
}
// The same with an offset, and without a rounding before the product.
KILN_FN void scale_chunk_rounding_once(Chunk& x, const SCALAR_T* weight, float scale,
                                       float offset) {
  Chunk w;
  w.load(weight);
#pragma unroll
  for (int i = 0; i < kVectors * 4; ++i) {
    uint32_t& word = x.part[i / 4].word[i % 4];
    float y[Word::kSize], factor[Word::kSize];
    scale_word(word, scale, y);
    Word::unpack(w.part[i / 4].word[i % 4], factor);
#pragma unroll
    for (int k = 0; k < Word::kSize; ++k)
      y[k] = kiln::mul_rn(y[k], kiln::add_rn(factor[k], offset));
    word = Word::packed(y);
  }
}

// Broadcast lane 1's value.
KILN_FN int64_t slot_of(int64_t near) {
  const uint32_t low = __shfl_sync(kWarp, uint32_t(near), 1);
  const uint32_t high = __shfl_sync(kWarp, uint32_t(uint64_t(near) >> 32), 1);
  return int64_t(uint64_t(high) << 32 | low);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
rope_store(SCALAR_T* out, KV_T* key_pool, KV_T* value_pool, const SCALAR_T* query,
           const SCALAR_T* key, const SCALAR_T* value, const int64_t* positions,
           const float* cos_sin_table, const int64_t* slot_mapping, const SCALAR_T* query_weight,
           const SCALAR_T* key_weight, int heads, int kv_heads, int head_dim, int half,
           int block_size, int block_shift, int64_t out_stride, int64_t out_head_stride,
           int64_t query_stride, int64_t query_head_stride, int64_t key_stride,
           int64_t key_head_stride, int64_t value_stride, int64_t value_head_stride,
           int64_t key_block, int64_t key_head, int64_t key_place, int64_t value_block,
           int64_t value_head, int64_t value_place, float inverse_dim, float eps,
           float weight_offset, int once, float k_scale, float v_scale) {
  kiln::pdl_wait_then_trigger();
  const Place place(head_dim, half);
  const int64_t token = blockIdx.x;
  // Odd lanes load the slot. Even lanes prefetch the position, which is read below.
  const uint32_t odd = (threadIdx.y * blockDim.x + threadIdx.x) % 2;
  const int64_t near = (odd ? slot_mapping : positions)[token];
  const int head = blockIdx.y * blockDim.y + threadIdx.y, kv_head = head - heads;
  const bool is_query = kv_head < 0, is_value = kv_head >= kv_heads;
  const int h = is_query ? head : is_value ? kv_head - kv_heads : kv_head;
  const SCALAR_T* from = is_query   ? query + token * query_stride + h * query_head_stride
                         : is_value ? value + token * value_stride + h * value_head_stride
                                    : key + token * key_stride + h * key_head_stride;
  const bool there = kv_head < 2 * kv_heads;
  const bool has_first = there && place.first < place.chunks;
  const bool has_second = there && place.second < place.chunks;
  const int i = place.first * kChunk, j = place.second * kChunk;
  Chunk a = {}, b = {};  // in flight while position and slot load
  if (has_first) a.load(from + i);
  if (has_second) b.load(from + j);
  __syncwarp();  // else the compiler issues these loads after the position's
  const int64_t position = positions[token];
  const bool rotated = has_first && place.rotated && !is_value;
  kiln::CosSin<kChunk> angles;
  if (rotated)
    angles.load(cos_sin_table + position * 2 * half + i,
                cos_sin_table + (position * 2 + 1) * half + i);

  if (query_weight) {
    const float mean = kiln::mul_rn(sum_of_squares(a, b, place), inverse_dim);
    const float scale = kiln::rcp_rn(kiln::sqrt_rn(kiln::add_rn(mean, eps)));
    const SCALAR_T* weight = is_query ? query_weight : key_weight;
    const bool scales_first = has_first && !is_value, scales_second = has_second && !is_value;
    if (!once) {
      if (scales_first) scale_chunk(a, weight + i, scale);
      if (scales_second) scale_chunk(b, weight + j, scale);
    } else {
      if (scales_first) scale_chunk_rounding_once(a, weight + i, scale, weight_offset);
      if (scales_second) scale_chunk_rounding_once(b, weight + j, scale, weight_offset);
    }
  }
  if (rotated) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) angles.rotate(a.part[v], b.part[v], v * Vector::kSize);
  }

  const int64_t slot = slot_of(near);
  if (is_query) {
    SCALAR_T* to = out + token * out_stride + h * out_head_stride;
    if (has_first) a.store(to + i);
    if (has_second) b.store(to + j);
  } else if (slot >= 0) {
    // 64-bit division is ten times the code. Such a pool has at most 2^32 slots.
    const int64_t block =
        block_shift >= 0 ? slot >> block_shift : uint32_t(slot) / uint32_t(block_size);
    const int64_t row = slot - block * block_size;
    KV_T* to = is_value ? value_pool + block * value_block + h * value_head + row * value_place
                        : key_pool + block * key_block + h * key_head + row * key_place;
    const float scale = is_value ? v_scale : k_scale;
    if (has_first) store_chunk(to + i, a, scale);
    if (has_second) store_chunk(to + j, b, scale);
  }
}
