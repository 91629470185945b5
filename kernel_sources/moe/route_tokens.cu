// ids[t, :] = the top_k experts of largest choice[t, :], largest first, ties to the lower id
// weights[t, j] = score[t, ids[t, j]] / (renormalise ? max(their sum + 1e-20, least_sum) : 1)
//   * factor
//   score = softmax or sigmoid of logits[t, :]; choice = score + bias. With groups of experts, only
//   the top_groups groups are eligible, ranked by the sum of their two largest choices, or by the
//   largest alone (by_largest).
//
// logits: [tokens, experts], any row stride; bias: [experts] or null; ids, weights: [tokens,
// top_k]. experts <= MAX_EXPERTS, divisible by num_groups; top_k <= 32 and <= the experts in the
// kept groups. A NaN logit counts as -inf and +inf as the largest float, so ids are distinct and in
// range; an expert at -inf has weight 0. Without bias and groups, logits are compared directly,
// without rounding. Compile-time parameters (jit_kernels/ops/moe/spec.py): ROUTER_T, MAX_EXPERTS.
// Work split: one warp per token, in exactly rounded float32: the same bits on every GPU.
#include "kiln/math/exact.cuh"
#include "kiln/ptx/launch.cuh"
#include "kiln/ptx/warp.cuh"
#include "kiln/math/reduce.cuh"

#ifndef ROUTER_T  // defaults, so that an editor can parse this file on its own
#define ROUTER_T kiln::bf16
#define MAX_EXPERTS 256
#endif

namespace {

constexpr int kPerLane = MAX_EXPERTS / 32;  // entry i of a lane is expert lane * kPerLane + i
constexpr uint32_t kTaken = 0, kOutside = 1;  // keys below that of any number
constexpr uint32_t kAll = 0xffffffffu;
constexpr float kLargest = 3.4028235e38f, kLog2e = 1.44269504f;

// Integer key with the order of x, which is neither NaN nor -0.
KILN_FN uint32_t ordered(float x) {
  const uint32_t u = kiln::as_uint(x);
  return u >> 31 ? ~u : u | 0x80000000u;
}
KILN_FN float comparable(float x) { return x == x ? x : kiln::minus_infinity(); }

// e^x for x <= 0.
KILN_FN float exp_of(float x) { return kiln::exp2_exact(kiln::mul_rn(x, kLog2e)); }

KILN_FN float cleaned(float x) { return x == x ? fminf(x, kLargest) : kiln::minus_infinity(); }

// The exponential in a logit's score: e^-|x| for a sigmoid, else e^(x - largest).
KILN_FN float exponential_of(float x, bool sigmoid, float largest) {
  const float e = exp_of(sigmoid ? (x < 0.0f ? x : -x) : kiln::sub_rn(x, largest));
  return x == kiln::minus_infinity() ? 0.0f : e;
}
// Score of a logit x; `total`: the sum of all exponentials of a softmax.
KILN_FN float score_of(float x, float exponential, bool sigmoid, float total) {
  const float over = sigmoid && !(x < 0.0f) ? 1.0f : exponential;
  const float under = sigmoid ? kiln::add_rn(1.0f, exponential) : total;
  return under > 0.0f ? kiln::div_rn(over, under) : 0.0f;
}

// Four entries at a time, not inlined: one copy of the code is less to compile and to fetch than
// one for each entry, and four entries overlap.
struct Four { float v[4]; };
KILN_NOINLINE Four exponentials_of(Four x, bool sigmoid, float largest) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.v[i] = exponential_of(x.v[i], sigmoid, largest);
  return x;
}
KILN_NOINLINE Four scores_of(Four x, Four exponential, bool sigmoid, float total) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x.v[i] = score_of(x.v[i], exponential.v[i], sigmoid, total);
  return x;
}

// The two largest of some numbers.
struct Two {
  float first = kiln::minus_infinity(), second = kiln::minus_infinity();

  KILN_FN void take(float x) {
    second = fmaxf(second, fminf(first, x));
    first = fmaxf(first, x);
  }
  KILN_FN void take_lanes(int m) {
    const float other = __shfl_xor_sync(kAll, first, m);
    second = fmaxf(second, __shfl_xor_sync(kAll, second, m));
    take(other);
  }
};

// Key of group g in lane g < num_groups: the sum of its two largest choices, or the largest. If a group fills
// `lanes` whole lanes, a power of two, all groups are reduced at once; if lanes is 0, any `size`
// works.
KILN_FN uint32_t key_of_group(const Four (&choice)[kPerLane / 4], int lane, int lanes, int size,
                              int num_groups, bool by_largest) {
  uint32_t of_group = kTaken;
#pragma unroll 1
  for (int g = 0; g < (lanes ? 1 : num_groups); ++g) {
    Two two;
    const int first = lanes ? 0 : lane * kPerLane - g * size;  // this lane's first entry in it
#pragma unroll
    for (int i = 0; i < kPerLane; ++i)
      if (uint32_t(first + i) < uint32_t(size)) two.take(choice[i / 4].v[i % 4]);
#pragma unroll 1
    for (int m = 1; m < (lanes ? lanes : 32); m *= 2) two.take_lanes(m);
    const float more = by_largest ? 0.0f : two.second;
    const uint32_t own = ordered(comparable(kiln::add_rn(two.first, more)));
    if (lanes) of_group = __shfl_sync(kAll, own, lane * lanes % 32);
    else if (lane == g) of_group = own;
  }
  return lane < num_groups ? of_group : kTaken;
}

// Mark the keys of experts outside the top groups: at least top_groups groups precede theirs.
KILN_FN void keep_groups(uint32_t (&key)[kPerLane], const Four (&choice)[kPerLane / 4], int lane,
                         int experts, int num_groups, int top_groups, bool by_largest) {
  const int size = experts / num_groups;
  const bool whole = size % kPerLane == 0 && (size & (size - 1)) == 0;
  const int lanes = whole ? size / kPerLane : 0;
  const uint32_t own = key_of_group(choice, lane, lanes, size, num_groups, by_largest);
  int before = 0;
#pragma unroll 1
  for (int g = 0; g < num_groups; ++g) {
    const uint32_t other = __shfl_sync(kAll, own, g);
    before += other > own || (other == own && g < lane);
  }
  const uint32_t kept = __ballot_sync(kAll, lane < num_groups && before < top_groups);
  uint32_t inside = 0;  // bit i: entry i of this lane is in a kept group
  if (lanes) {
    inside = kept >> (lane / lanes) & 1 ? kAll : 0;
  } else {
    int group = lane * kPerLane / size, next = (group + 1) * size;
#pragma unroll 1
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane * kPerLane + i;
      if (expert == next) ++group, next += size;
      inside |= (expert < experts ? kept >> group & 1 : 0) << i;
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) key[i] = inside >> i & 1 ? key[i] : kOutside;
}

KILN_FN uint32_t largest_of(const uint32_t (&key)[kPerLane]) {
  uint32_t best = key[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) best = key[i] > best ? key[i] : best;
  return best;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
route_tokens(float* weights, int32_t* ids, const ROUTER_T* logits, const float* bias,
             int64_t tokens, int64_t logits_stride, int experts, int top_k, int num_groups,
             int top_groups, int by_largest, int sigmoid, int renormalise, float least_sum,
             float factor) {
  kiln::pdl_wait_then_trigger();
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const bool by_logit = bias == nullptr && num_groups == 1;
  for (int64_t token = int64_t(blockIdx.x) * warps + threadIdx.x / 32; token < tokens;
       token += int64_t(gridDim.x) * warps) {
    __syncwarp();  // converges the lanes: else the compiler emits each shuffle twice
    const ROUTER_T* row = logits + token * logits_stride;
    Four x[kPerLane / 4], e[kPerLane / 4];
    uint32_t key[kPerLane];
    float largest = kiln::minus_infinity(), total = 0.0f;
    ROUTER_T logit[kPerLane];
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {  // issue all loads first
      logit[i] = ROUTER_T{};
      if (lane * kPerLane + i < experts) logit[i] = row[lane * kPerLane + i];
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      float& own = x[i / 4].v[i % 4];
      own = cleaned(kiln::to_float(logit[i]));
      if (lane * kPerLane + i >= experts) own = kiln::minus_infinity();
      largest = fmaxf(largest, own);
    }
    if (!sigmoid) largest = kiln::warp_max(largest);
    if (!sigmoid || !by_logit) {
#pragma unroll
      for (int i = 0; i < kPerLane / 4; ++i) e[i] = exponentials_of(x[i], sigmoid, largest);
    }
    if (!sigmoid) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) total = kiln::add_rn(total, e[i / 4].v[i % 4]);
      total = kiln::warp_sum(total);
    }
    if (!by_logit) {
#pragma unroll
      for (int i = 0; i < kPerLane / 4; ++i) x[i] = scores_of(x[i], e[i], sigmoid, total);
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {  // from here on x is the choice
      const int expert = lane * kPerLane + i;
      const float more = bias && expert < experts ? bias[expert] : 0.0f;  // also turns -0 into 0
      float& own = x[i / 4].v[i % 4];
      own = comparable(kiln::add_rn(own, more));
      key[i] = expert < experts ? ordered(own) : kTaken;
    }
    if (num_groups > 1) keep_groups(key, x, lane, experts, num_groups, top_groups, by_largest);
    int id = 0;  // lane j: the expert chosen in round j
    uint32_t best = largest_of(key);
#pragma unroll 1
    for (int j = 0; j < top_k; ++j) {
      const uint32_t most = kiln::warp_largest(best);
      const int owner = __ffs(__ballot_sync(kAll, best == most)) - 1;  // the lowest ids
      int at = 0;
      if (lane == owner) {
#pragma unroll
        for (int i = kPerLane - 1; i >= 0; --i) at = key[i] == most ? i : at;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)  // a select, not an index: keys stay in registers
          key[i] = i == at ? kTaken : key[i];
        best = largest_of(key);
      }
      const int expert = owner * kPerLane + __shfl_sync(kAll, at, owner);
      if (lane == j) id = expert;
    }
    float weight = 0.0f;
    if (lane < top_k) {
      const float own = cleaned(kiln::to_float(row[id]));
      weight = score_of(own, exponential_of(own, sigmoid, largest), sigmoid, total);
    }
    if (renormalise) {
      float sum = 0.0f;
#pragma unroll 1
      for (int j = 0; j < top_k; ++j) sum = kiln::add_rn(sum, __shfl_sync(kAll, weight, j));
      weight = kiln::div_rn(weight, fmaxf(kiln::add_rn(sum, 1e-20f), least_sum));
    }
    if (lane < top_k) {
      ids[token * top_k + lane] = id;
      weights[token * top_k + lane] = kiln::mul_rn(weight, factor);
    }
  }
}
