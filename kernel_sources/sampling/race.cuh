// The exponential race that draws a token: over a list, or over a row with few random numbers.
#pragma once
#include "sampling/visit.cuh"

namespace kiln {

// Append the values of lanes that have one to a warp's list. `count` also counts what does not fit.
template <class V> KILN_FN void push(bool has, int value, V* list, int& count, int room) {
  const uint32_t all = __ballot_sync(0xffffffffu, has);
  const int slot = count + __popc(all & ((1u << threadIdx.x % 32) - 1));
  if (has && slot < room) list[slot] = value;
  count += __popc(all);
}

// Find the tokens whose random number is low, and compute their clocks, into s.lows. Each warp
// works by itself, and nothing here depends on logits.
KILN_NOINLINE void find_lows(Noise noise, int vocab, SamplerShared& s) {
  constexpr int kStep = 4 * kGroup, kQueue = kStep + 32;
  const int lane = threadIdx.x % 32, groups = (vocab + kGroup - 1) / kGroup;
  uint32_t* queue = s.units + threadIdx.x / 32 * kQueue;
  auto& own = s.lows[threadIdx.x / 32];
  int queued = 0, found = 0;
#pragma unroll 1
  for (int at = threadIdx.x - lane; at < groups;) {
    // Queue the groups with a low number until a warp has enough of them.
#pragma unroll 2
    for (int n = 0; n < kStep; n += 32, at += blockDim.x) {
      const bool has = at + lane < groups && noise.group(at + lane) > kNoneLow;
      push(has, at + lane, queue, queued, kQueue);
    }
    if (queued < 32 && at < groups) continue;
    __syncwarp();
#pragma unroll 1
    for (int q = 0; q < queued; q += 32) {
      const uint32_t g = queue[min(q + lane, queued - 1)], of_all = noise.group(g);
      int first = 0;
#pragma unroll
      for (int half = 16; half; half /= 2)
        if (of_all <= s.none_low[first + half]) first += half;
      uint32_t low = q + lane < queued ? lows_from(noise, g, first) : 0;
      while (__any_sync(0xffffffffu, low != 0)) {
        const int token = int(g) * kGroup + 31 - __clz(int(low & (0 - low)));
        push(low != 0 && token < vocab, token, own.tokens, found, kLows);
        low &= low - 1;
      }
    }
    __syncwarp();
    queued = 0;
  }
  if (lane == 0) own.count = min(found, kLows);
  if (lane == 0 && found > kLows) atomicOr(&s.lows_lost, 1u);
#pragma unroll 1
  for (int q = lane; q < min(found, kLows); q += 32)
    own.clocks[q] = exponential(noise.bits(own.tokens[q], true));
}

// Race of the tokens in s.lows. Each lane reads the clocks that it wrote itself.
template <class T>
KILN_NOINLINE uint64_t race_of_lows(const Row<T>& row, Weights weights, float cutoff,
                                    const SamplerShared& s) {
  const auto& own = s.lows[threadIdx.x / 32];
  uint64_t first = ~uint64_t(0);
#pragma unroll 1
  for (int q = threadIdx.x % 32; q < own.count; q += 32) {
    const int token = own.tokens[q];
    const float x = row.masked_at(token);
    if (x >= cutoff) first = min(first, arrival_of(own.clocks[q], weights, token, x));
  }
  return first;
}

// Race over the list.
KILN_NOINLINE uint64_t race_of_list(Visitor race, const SamplerShared& s) {
  uint64_t first = ~uint64_t(0);
#pragma unroll 1
  for (int j = threadIdx.x; j < int(s.listed); j += blockDim.x) {
    const float x = value_of_entry(s.list[j]);
    if (x < race.least) continue;
    first = min(first, arrival_of(Noise{race.state}, race.weights, token_of_entry(s.list[j]), x,
                                  race.high, s.none_low));
  }
  return first;
}

// Race over all tokens of a row, after find_lows. `best` and `token`: one logit of each thread.
// These, the edited tokens, and those with a low number (one in 256) race first. Then only tokens
// that can still win race. A token with a low number may race again as if it had none: it then
// arrives later, so the result is the same.
template <class T>
KILN_NOINLINE uint64_t race_of_row(const Row<T>& row, Peaks peaks, float best, int token,
                                   Visitor race, SamplerShared& s) {
  const bool lost = s.lows_lost != 0;
  race.high = !lost && !row.has_edits();  // tokens with a low number race separately
  uint64_t first = visit(row, peaks, true, race, s);
  if (best >= race.least) first = race.visit(first, token, best, s);
  if (!lost) {
    first = min(first, race_of_lows(row, race.weights, race.least, s));
    const uint64_t soonest = ~largest_of(~first, s.soonest);
    // A smaller weight without a low number cannot arrive by then: -log(1 - u) > u.
    const float least = -8.0f - log2_fast(as_float(uint32_t(soonest >> 32)));
    race.least = fmaxf(race.least, race.weights.logit_below(least));
    list_from(row, peaks, key_of(race.least), s);
    if (s.listed <= kCandidates) return min(first, race_of_list(race, s));
  }
  return min(first, visit(row, peaks, false, race, s));  // too many for the list
}

}  // namespace kiln
