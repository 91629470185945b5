// out_ids[t, :] = the top_k experts of largest choice[t, :], first the largest, ties to the lower id
// out_weights[t, j] = score[t, out_ids[t, j]] / (renormalise ? their sum + 1e-20 : 1) * factor
//   score = softmax or sigmoid of logits[t, :]; choice = score + bias. With groups of neighbours,
//   only experts of the top_groups groups of largest sum of their two largest choices are chosen.
//
// logits: [tokens, experts], rows may be strided; bias: [experts] or null; out_*: [tokens, top_k].
// experts <= MAX_EXPERTS, num_groups divides them; top_k <= 32 and <= what the kept groups hold.
// A NaN counts as -inf and +inf as the largest float, so ids are always distinct and in range; an
// expert at -inf weighs 0. Without bias and groups the logits themselves are compared: nothing is
// rounded. One warp a token, in exactly rounded float32: the same bits anywhere.
// Compile-time parameters (jit_kernels/ops/moe.py): LOGITS_T, MAX_EXPERTS.
#include "kiln/math.cuh"
#include "kiln/ptx_warp.cuh"
#include "kiln/reduce.cuh"

#ifndef LOGITS_T  // defaults, so that an editor can parse this file on its own
#define LOGITS_T kiln::bf16
#define MAX_EXPERTS 256
#endif

namespace {

constexpr int kPerLane = MAX_EXPERTS / 32;  // expert lane * kPerLane + i is entry i of a lane
constexpr uint32_t kTaken = 0, kOutside = 1;  // keys below that of any number
constexpr uint32_t kAll = 0xffffffffu;
constexpr float kLargest = 3.4028235e38f, kLog2e = 1.44269504f;

// Larger for a larger x; equal for both zeros, and for NaN and -inf.
KILN_FN uint32_t ordered(float x) {
  const uint32_t u = kiln::as_uint(kiln::add_rn(x == x ? x : kiln::minus_infinity(), 0.0f));
  return u >> 31 ? ~u : u | 0x80000000u;
}
KILN_FN float unordered(uint32_t key) { return kiln::as_float(key >> 31 ? key ^ 0x80000000u : ~key); }

// e^x for x <= 0.
KILN_FN float exp_of(float x) { return kiln::exp2_exact(kiln::mul_rn(x, kLog2e)); }

KILN_FN float cleaned(float x) { return x == x ? fminf(x, kLargest) : kiln::minus_infinity(); }
KILN_FN float softmax_part(float x, float largest) {
  return x == kiln::minus_infinity() ? 0.0f : exp_of(kiln::sub_rn(x, largest));
}

// What a logit x weighs; `total` is the sum of all softmax parts, or 0 for a sigmoid.
KILN_FN float score_of(float x, bool sigmoid, float largest, float total) {
  const float e = sigmoid ? exp_of(x < 0.0f ? x : -x) : softmax_part(x, largest);
  const float over = sigmoid && !(x < 0.0f) ? 1.0f : e;
  const float under = sigmoid ? kiln::add_rn(1.0f, e) : total;
  return under > 0.0f && x != kiln::minus_infinity() ? kiln::div_rn(over, under) : 0.0f;
}
// One copy of the code for many entries, which take twice as long to compile otherwise.
KILN_NOINLINE float called_score_of(float x, bool sigmoid, float largest, float total) {
  return score_of(x, sigmoid, largest, total);
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

// The key of the group of each lane g < num_groups: the sum of its two largest choices.
KILN_FN uint32_t key_of_group(const uint32_t (&key)[kPerLane], int lane, int size, int num_groups) {
  const int lanes = size / kPerLane;
  if (lanes * kPerLane == size && (lanes & (lanes - 1)) == 0) {  // groups of whole lanes
    Two two;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) two.take(unordered(key[i]));
#pragma unroll 1
    for (int m = 1; m < lanes; m *= 2) two.take_lanes(m);
    const uint32_t own = ordered(kiln::add_rn(two.first, two.second));
    const uint32_t of_group = __shfl_sync(kAll, own, lane * lanes % 32);
    return lane < num_groups ? of_group : kTaken;
  }
  uint32_t of_group = kTaken;
#pragma unroll 1
  for (int g = 0; g < num_groups; ++g) {
    Two two;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane * kPerLane + i;
      if (expert >= g * size && expert < (g + 1) * size) two.take(unordered(key[i]));
    }
    for (int m = 16; m; m >>= 1) two.take_lanes(m);
    if (lane == g) of_group = ordered(kiln::add_rn(two.first, two.second));
  }
  return of_group;
}

// Mark the keys of all experts outside the top groups: those that too many others come before.
KILN_FN void keep_groups(uint32_t (&key)[kPerLane], int lane, int experts, int num_groups,
                         int top_groups) {
  const int size = experts / num_groups;
  const uint32_t own = key_of_group(key, lane, size, num_groups);
  int before = 0;
#pragma unroll 1
  for (int g = 0; g < num_groups; ++g) {
    const uint32_t other = __shfl_sync(kAll, own, g);
    before += other > own || (other == own && g < lane);
  }
  const uint32_t kept = __ballot_sync(kAll, lane < num_groups && before < top_groups);
  int group = lane * kPerLane / size, next = (group + 1) * size;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane * kPerLane + i;
    if (expert == next) ++group, next += size;
    if (expert < experts && !(kept >> group & 1)) key[i] = kOutside;
  }
}

KILN_FN uint32_t largest_of(const uint32_t (&key)[kPerLane]) {
  uint32_t best = key[0];
#pragma unroll
  for (int i = 1; i < kPerLane; ++i) best = key[i] > best ? key[i] : best;
  return best;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
route_tokens(float* out_weights, int32_t* out_ids, const LOGITS_T* logits, const float* bias,
             int64_t tokens, int64_t stride, int experts, int top_k, int num_groups,
             int top_groups, int sigmoid, int renormalise, float factor) {
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const bool by_logit = bias == nullptr && num_groups == 1;
  for (int64_t token = int64_t(blockIdx.x) * warps + threadIdx.x / 32; token < tokens;
       token += int64_t(gridDim.x) * warps) {
    const LOGITS_T* row = logits + token * stride;
    float x[kPerLane];
    uint32_t key[kPerLane];
    float largest = kiln::minus_infinity(), total = 0.0f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane * kPerLane + i;
      x[i] = expert < experts ? cleaned(kiln::to_float(row[expert])) : kiln::minus_infinity();
      key[i] = expert < experts ? ordered(x[i]) : kTaken;
      largest = fmaxf(largest, x[i]);
    }
    if (!sigmoid) {
      largest = kiln::warp_max(largest);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) total = kiln::add_rn(total, softmax_part(x[i], largest));
      total = kiln::warp_sum(total);
    }
    if (!by_logit) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int expert = lane * kPerLane + i;
        const float score = kPerLane > 8 ? called_score_of(x[i], sigmoid, largest, total)
                                         : score_of(x[i], sigmoid, largest, total);
        if (expert < experts) key[i] = ordered(bias ? kiln::add_rn(score, bias[expert]) : score);
      }
      if (num_groups > 1) keep_groups(key, lane, experts, num_groups, top_groups);
    }
    int id = 0;  // of lane j: what was chosen in round j
    uint32_t best = largest_of(key);
#pragma unroll 1
    for (int j = 0; j < top_k; ++j) {
      const uint32_t most = kiln::warp_largest(best);
      const int owner = __ffs(__ballot_sync(kAll, best == most)) - 1;  // has the lowest ids
      int at = 0;
      if (lane == owner) {
#pragma unroll
        for (int i = kPerLane - 1; i >= 0; --i) at = key[i] == most ? i : at;
#pragma unroll
        for (int i = 0; i < kPerLane; ++i)  // a choice, not an index: keys stay in registers
          key[i] = i == at ? kTaken : key[i];
        best = largest_of(key);
      }
      const int expert = owner * kPerLane + __shfl_sync(kAll, at, owner);
      if (lane == j) id = expert;
    }
    float weight = 0.0f;
    if (lane < top_k)
      weight = score_of(cleaned(kiln::to_float(row[id])), sigmoid, largest, total);
    if (renormalise) {
      float sum = 0.0f;
#pragma unroll 1
      for (int j = 0; j < top_k; ++j) sum = kiln::add_rn(sum, __shfl_sync(kAll, weight, j));
      weight = kiln::div_rn(weight, kiln::add_rn(sum, 1e-20f));
    }
    if (lane < top_k) {
      out_ids[token * top_k + lane] = id;
      out_weights[token * top_k + lane] = kiln::mul_rn(weight, factor);
    }
  }
}
