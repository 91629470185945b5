// The race that draws a token: over a list, or over a row without most of its noise.
#pragma once
#include "sampling/visit.cuh"

namespace kiln {

// Append to a warp's list the values of the lanes that have one; `count` them all.
template <class V> KILN_FN void push(bool has, int value, V* list, int& count, int room) {
  const uint32_t all = __ballot_sync(0xffffffffu, has);
  const int slot = count + __popc(all & ((1u << threadIdx.x % 32) - 1));
  if (has && slot < room) list[slot] = value;
  count += __popc(all);
}

// Find the tokens whose random number is low, for s.lows, with what their clocks show: each warp by
// itself. Nothing here waits for a logit.
KILN_NOINLINE void find_lows(Noise noise, int vocab, SamplerShared& s) {
  constexpr int kStep = 4 * kGroup, kQueue = kStep + 32;
  const int lane = threadIdx.x % 32, groups = (vocab + kGroup - 1) / kGroup;
  uint32_t* queue = s.units + threadIdx.x / 32 * kQueue;
  auto& own = s.lows[threadIdx.x / 32];
  int queued = 0, found = 0;
#pragma unroll 1
  for (int at = threadIdx.x - lane; at < groups;) {
    // Groups with a low number wait in a queue until there are enough for a warp.
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

// The tokens whose number is low. Each thread reads what it wrote itself.
template <class T>
KILN_NOINLINE uint64_t race_of_lows(const Row<T>& row, Weights weights, float cutoff,
                                    const SamplerShared& s) {
  const auto& own = s.lows[threadIdx.x / 32];
  uint64_t first = ~uint64_t(0);
#pragma unroll 1
  for (int q = threadIdx.x % 32; q < own.count; q += 32) {
    const int token = own.tokens[q];
    const float x = row.shown(token);
    if (x >= cutoff) first = min(first, arrival_of(own.clocks[q], weights, token, x));
  }
  return first;
}

// Over the list.
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

// Over all tokens of a row after find_lows; a thread knows the logit and id of one, `best` of
// `token`. First run those and the edited, beside those whose number is low: one in 256. Then those
// who may still win. A token whose number is low arrives sooner than if it were not: no harm where
// it runs twice.
template <class T>
KILN_NOINLINE uint64_t race_of_row(const Row<T>& row, Peaks peaks, float best, int token,
                                   Visitor race, SamplerShared& s) {
  const bool lost = s.lows_lost != 0;
  race.high = !lost && !row.has_edits();  // the low ones run of their own
  uint64_t first = visit(row, peaks, true, race, s);
  if (best >= race.least) first = race.visit(first, token, best, s);
  if (!lost) {
    first = min(first, race_of_lows(row, race.weights, race.least, s));
    const uint64_t soonest = ~largest_of(~first, s.soonest);
    // By then arrives nobody of less weight whose number is not low: -log(1 - u) > u.
    const float least = -8.0f - log2_fast(as_float(uint32_t(soonest >> 32)));
    race.least = fmaxf(race.least, race.weights.logit_below(least));
    list_from(row, peaks, key_of(race.least), s);
    if (s.listed <= kCandidates) return min(first, race_of_list(race, s));
  }
  return min(first, visit(row, peaks, false, race, s));  // too many are left
}

}  // namespace kiln
