// The race that draws a token: over a list, or over a row without most of its noise.
#pragma once
#include "kiln/shortlist.cuh"

namespace kiln {

enum Low : int { kHigh, kLow, kUnknown };

// When a token arrives: the first of all is drawn, with a probability proportional to its weight.
// As one number with the token, which decides between equal times.
KILN_NOINLINE uint64_t arrival_of(Noise noise, Weights weights, int token, float x, int low) {
  if (low == kUnknown) low = lows_of(noise, token / kGroup) >> token % kGroup & 1;
  const float time = div_rn(exponential(noise.bits(token, low)), weights(x));
  return uint64_t(as_uint(time)) << 32 | uint32_t(token);
}

// What runs: tokens that are at least the cutoff. Each thread keeps the first of its own.
struct Race {
  Noise noise;
  Weights weights;
  float cutoff;
  uint64_t first;

  KILN_FN void run(int token, float x, int low = kUnknown) {
    if (x >= cutoff) first = min(first, arrival_of(noise, weights, token, x, low));
  }
};

// Over the list.
KILN_NOINLINE uint64_t race_of_list(Race race, const SamplerShared& s) {
  each_listed(s, [&](int token, float x) { race.run(token, x); });
  return race.first;
}

// Over all tokens of a row; a thread knows the logit and id of one, `best` of `token`. First run
// those, the edited, and one token in 256, whose number is low; then those who may still win.
template <class T>
KILN_NOINLINE uint64_t race_of_row(const Row<T>& row, Peaks peaks, float best, int token, Race race,
                                   SamplerShared& s) {
  if (threadIdx.x == 0) s.num_units = 0;
  __syncthreads();
  const int groups = (row.vocab + kGroup - 1) / kGroup;
#pragma unroll 1
  for (int g = threadIdx.x; g < groups; g += blockDim.x) {
    if (race.noise.group(g) < kNoneIsLow) continue;
    const uint32_t slot = atomicAdd(&s.num_units, 1u);
    if (slot < kUnits) s.units[slot] = g;
  }
  race.run(token, best);
  row.each_edit([&](int edited, float x) { race.run(edited, x); });
  __syncthreads();
  const int queued = s.num_units;
  if (queued <= kUnits) {
#pragma unroll 1
    for (int q = threadIdx.x; q < queued; q += blockDim.x) {
      const int from = int(s.units[q]) * kGroup;
#pragma unroll 1
      for (uint32_t low = lows_of(race.noise, s.units[q]); low; low &= low - 1) {
        const int of = from + 31 - __clz(int(low & (0 - low)));
        if (of < row.vocab) race.run(of, row.shown(of), kLow);
      }
    }
    const uint64_t soonest = ~reduce<Max>(~race.first, s.soonest);
    // By then arrives nobody of less weight whose number is not low: -log(1 - u) > u.
    const float least = -8.0f - log2_fast(as_float(uint32_t(soonest >> 32)));
    race.cutoff = fmaxf(race.cutoff, race.weights.logit_below(least));
    list_from(row, peaks, best, key_of(race.cutoff), s);
    if (s.listed <= kCandidates) return race_of_list(race, s);
  }
  row.each_token([&](int any, float x) { race.run(any, x); });  // too many are left
  return race.first;
}

}  // namespace kiln
