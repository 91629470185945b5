// Rare passes over single logits of a whole row. One routine that is not inlined serves them all,
// to keep the program small.
#pragma once
#include "sampling/shortlist.cuh"

namespace kiln {

// Arrival time of a token, clock / weight. The earliest token is drawn, so the probability of a
// token is proportional to its weight. The token id in the low bits breaks ties.
KILN_FN uint64_t arrival_of(float clock, Weights weights, int token, float x) {
  return uint64_t(as_uint(div_rn(clock, weights(x)))) << 32 | uint32_t(token);
}
// Arrival time of a token from the row's noise. high: the token's random number is known not to be
// low.
KILN_NOINLINE uint64_t arrival_of(Noise noise, Weights weights, int token, float x, bool high,
                                  const NoneLow& none_low) {
  const bool low = !high && is_low(noise, token, none_low);
  return arrival_of(exponential(noise.bits(token, low)), weights, token, x);
}

// What a thread computes over its part of a row.
enum class Visit {
  mass,     // the sum of their masses
  count,    // their number
  race,     // the first arrival
  largest,  // the largest entry below another
};

struct Visitor {
  Visit what;
  float least;  // smallest logit to visit
  Weights weights;
  uint64_t state = 0;  // race: the row's noise; largest: the upper limit
  bool high = false;   // race: treat every token's number as not low

  // Update the result with one logit.
  KILN_FN uint64_t visit(uint64_t sum, int token, float x, SamplerShared& s) const {
    if (what == Visit::mass) return sum + weights.mass(x);
    if (what == Visit::count) return sum + 1;
    if (what == Visit::race)
      return min(sum, arrival_of(Noise{state}, weights, token, x, high, s.none_low));
    const uint64_t entry = entry_of(x, token);
    return entry < state ? max(sum, entry) : sum;
  }
};

// Return the result over this thread's part of a row, or of the edited tokens alone.
template <class T>
KILN_NOINLINE uint64_t visit(const Row<T>& row, Peaks peaks, bool edits_alone, Visitor visitor,
                             SamplerShared& s) {
  const int units = edits_alone ? 0 : row.num_units(), first_edit = row.edits.first;
  const int edits = row.edits.last - first_edit;
  const uint32_t least = key_of(visitor.least);
  uint64_t sum = visitor.what == Visit::race ? ~uint64_t(0) : 0;
#pragma unroll 1
  for (int i = 0, u = threadIdx.x; u < units + edits; ++i, u += blockDim.x) {
    float x[kUnit] = {};
    uint32_t left = 0;
    int first = u * kUnit;
    if (u >= units) {
      const int e = first_edit + u - units;
      first = row.edits.tokens[e], x[0] = row.edited(e), left = x[0] >= visitor.least;
    } else if (peaks.reaches(i, least)) {
      row.fetch(u, x);
      left = chosen(x, [&](float y) { return y >= visitor.least; });
    }
#pragma unroll 1
    for (; left; left &= left - 1)
      sum = visitor.visit(sum, first + first_of(left), pick(x, first_of(left)), s);
  }
  return sum;
}

}  // namespace kiln
