// The first pass over a row: its largest logit, its mass, and the tokens with low random numbers.
#pragma once
#include "sampling/race.cuh"

namespace kiln {

// Whether any is NaN or +inf. The scaled sum of finite logits is neither.
KILN_FN bool is_broken(const float (&x)[kUnit]) {
  float some[4];
#pragma unroll
  for (int k = 0; k < kUnit; ++k) some[k % 4] = fma_rn(x[k], 0x1p-5f, k < 4 ? 0.0f : some[k % 4]);
  return !((some[0] + some[1]) + (some[2] + some[3]) < infinity());
}

constexpr float kPlainScale = 1.44269504f;  // log2(e), for plain log-probabilities

// What the first pass computes besides the largest logit.
struct Plan {
  int64_t seed, position;
  float scale;  // weight = 2^(scale * logit); 0: no mass is needed
  bool races;   // find the low random numbers: all tokens will race
};

struct Settings {  // of one row
  float temperature, top_p, log_min_p;
  int top_k, num_top;
  bool report, greedy, cuts_count, cuts_mass, lists;
  Plan plan;
};

// The settings of a row as stored in memory.
struct StoredSettings {
  float temperature, top_p, log_min_p;
  int64_t seed, position, top_k, num_top;

  KILN_FN static StoredSettings load(const float* f, const int64_t* keys) {
    return {f[0], f[1], f[2], keys[0], keys[1], keys[2], keys[3]};
  }
  KILN_FN Settings settings(int vocab, int tokens, int width) const {
    const int count = int(min(top_k, int64_t(vocab)));
    const bool cuts_count = count > 0 && count < vocab, cuts_mass = top_p < 1.0f;
    const bool greedy = !(temperature >= 1e-5f) || top_k == 1, report = num_top >= 0;
    const float scale = greedy || cuts_count || !cuts_mass ? report ? kPlainScale : 0.0f
                                                           : Weights(0.0f, temperature).scale;
    const bool lists = cuts_count || cuts_mass || tokens <= kCandidates;
    return {temperature, top_p, log_min_p, count, int(min(num_top, int64_t(width))), report, greedy,
            cuts_count, cuts_mass, lists, {seed, position, scale, !greedy && !lists}};
  }
};

// The first token of a unit with this value; `token` is the unit's first.
template <class T> KILN_NOINLINE int find(const Row<T>& row, float value, int token) {
  float x[kUnit];
  row.fetch(token / kUnit, x);
  int place = 0;
#pragma unroll
  for (int k = kUnit - 1; k >= 0; --k) place = x[k] == value ? k : place;
  return token + place;
}

struct RowSummary {
  uint64_t first;  // entry of the row's largest logit; all ones if any is NaN or +inf
  uint64_t mass;   // approximate, in 2^-40 of the largest; without edited tokens; 0: unknown
  float value;     // this thread's largest logit
  int token;       // its token; without edits, the first of its unit, in `first` too

  // The token of this thread's largest logit, or of the row's.
  template <class T> KILN_FN int own_token(const Row<T>& row) const {
    return !row.has_edits() && value > minus_infinity() ? find(row, value, token) : token;
  }
  template <class T> KILN_FN int first_token(const Row<T>& row) const {
    const int unit = token_of_entry(first);
    return !row.has_edits() ? find(row, value_of_entry(first), unit) : unit;
  }
};

// With edits: the token of this thread's largest logit (`token`: the first of its unit), or of a
// larger edited one.
template <class T> KILN_FN void find_with_edits(const Row<T>& row, float& best, int& token) {
  token = find(row, best, token);
  row.each_edit([&](int e, float x) {
    if (x > best || (x == best && e < token)) best = x, token = e;
  });
}

// Mark in shared memory, one bit per token, what the mask forbids and what is edited. Edited tokens
// are processed separately.
template <class T> KILN_FN void hide(const Row<T>& row) {
  constexpr int kAtOnce = 8;
  uint32_t* hidden = reinterpret_cast<uint32_t*>(dynamic_shared());
  const uint32_t* allowed = row.allowed;
  const int words = (row.vocab + 31) / 32, step = blockDim.x;
#pragma unroll 1
  for (int first = threadIdx.x; first < words; first += kAtOnce * step) {
    uint32_t bits[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      bits[k] = allowed != nullptr && first + k * step < words ? ~allowed[first + k * step] : 0;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k)
      if (first + k * step < words) hidden[first + k * step] = bits[k];
  }
  __syncthreads();
#pragma unroll 1
  for (int e = row.edits.first + int(threadIdx.x); e < row.edits.last; e += blockDim.x)
    atomicOr(&hidden[row.edits.tokens[e] / 32], 1u << row.edits.tokens[e] % 32);
}

// The first pass. again: over the unedited row, after a pass with edits or another temperature.
// hides: some tokens are hidden in the first pass. `row` and `want` are in shared memory: thread 0
// has just written `row`, and writes `want` here.
template <class T>
KILN_NOINLINE RowSummary survey(const T* data, int vocab, const Row<T>& row, Peaks peaks,
                                const float* settings, const int64_t* keys, int width, bool hides,
                                bool again, Settings& want, SamplerShared& s) {
  constexpr int kDeep = 4 / sizeof(T);  // units in flight
  const int step = blockDim.x, units = (vocab + kUnit - 1) / kUnit;
  const int whole = is_vector_aligned(data) ? vocab / kUnit : 0;
  StoredSettings stored{};
  if (threadIdx.x == 0)  // issued before the loads of logits
    stored = StoredSettings::load(settings, keys);
  Unit<T> ahead[kDeep];
#pragma unroll
  for (int j = 0; j < kDeep; ++j)
    if (int(threadIdx.x) + j * step < whole)
      ahead[j] = Unit<T>::load(data + (threadIdx.x + j * step) * kUnit);
  if (hides && !again) {  // while the logits are loading
    __syncthreads();
    hide(row);
  }
  if (threadIdx.x == 0) {
    want = stored.settings(vocab, vocab + row.edits.last - row.edits.first, width);
    if (again) want.plan.scale = kPlainScale, want.plan.races = false;
    else s.listed = s.lows_lost = s.kept_count = 0;
    const int wide = step << peaks.shift;
    s.slots_used = (units + wide - 1) / wide * step;
  }
  if (threadIdx.x >= blockDim.x - kGroup) {
    const int k = kGroup - int(blockDim.x - threadIdx.x);
    s.none_low[k + 1] = none_low_of(k + 1);
    if (k == 0) s.none_low[0] = none_low_of(0);
  }
  __syncthreads();
  hides = row.hidden != nullptr;
  const Plan plan = want.plan;
  const float lowest = plan.scale > 0.0f ? UnitWeights::lowest_of(plan.scale) : 0.0f;
  if (plan.races) find_lows(Noise::of(plan.seed, plan.position), vocab, s);
  float best = minus_infinity();
  int unit = 0;
  bool broken = false;
  RunningMass mass{0, 0, 0, 0};
  uint16_t* slot = &peaks.slot(0);
  int i = 0, u = threadIdx.x;
#pragma unroll 1
  while (u < units) {
#pragma unroll
    for (int j = 0; j < kDeep; ++j) {
      if (u >= units) break;
      float x[kUnit];
      if (u >= whole) {
        row.fetch(u, x);
      } else {
        ahead[j].unpack(x);
        if (hides) hide(x, row.hides(u));
      }
      if (u + kDeep * step < whole) ahead[j] = Unit<T>::load(data + (u + kDeep * step) * kUnit);
      const float m = largest(x);
      if (m > best) best = m, unit = u;
      if (peaks.shift == 0) *slot = uint16_t(key_of(m) >> 16);
      else peaks.put(i, m);
      slot += step;
      float all = infinity();
      if (plan.scale > 0.0f) {
        const UnitWeights weights(x, m, plan.scale, lowest);
        all = weights.sum();
        mass.add(weights.exponent, UnitWeights::steps(all));
      }
      if (!(all < infinity())) broken |= is_broken(x);
      ++i, u += step;
    }
  }
#pragma unroll 1
  for (; i * step < units; ++i) peaks.put(i, minus_infinity());
  int token = unit * kUnit;
  if (row.has_edits()) find_with_edits(row, best, token);
  const uint64_t first = largest_of(broken ? ~uint64_t(0) : entry_of(best, token), s.best);
  const float top = value_of_entry(first);
  uint64_t all = 0;
  if (plan.scale > 0.0f && fabsf(top * plan.scale) < 0x1p20f)
    all = mass_of_row(mass, top, plan.scale, s.survey);
  return {first, all, best, token};
}

}  // namespace kiln
