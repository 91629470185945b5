// token[r] ~ softmax(edited logits[r, :] / temperature) over what mask, top-k, top-p, min-p leave
//
// logits: [rows, vocab], rows any distance apart and at any alignment; one block a row. settings
// [rows, 6], keys [rows, 4], mask [rows, ceil(vocab / 32)] and the lists of edits are laid out as
// jit_kernels/ops/sampling.py says; a token is edited at most once.
// Compile-time parameters (jit_kernels/ops/sampling.py): SCALAR_T.
//
// 1. One pass finds each thread's largest logit. A greedy row ends here.
// 2. The m-th largest of those bounds the m-th largest logit from below: a second pass lists what
//    reaches the bound, a few more than m, and adds up the masses that top-p and logprobs need.
// 3. The sorted list decides top-k and top-p. Where it does not reach far enough, a radix descent
//    over the row does, by histograms in shared memory.
// 4. What is left runs a race; the first to arrive is the token.
// Masses are integers and a race has one winner, so no step can tell how the work was cut up:
// block size, schedule and neighbours leave every bit of the result alone.
#include "kiln/race.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

namespace {
using namespace kiln;
using Logits = Row<SCALAR_T>;
constexpr float kLog2e = 1.44269504f;
constexpr uint32_t kGrain = sizeof(SCALAR_T) == 4 ? 1 : 1 << 12;  // of a bound's key
enum Error : int { kNan = 1, kInfinite = 2, kNothing = 4 };

struct Settings {  // of one row
  float temperature, top_p, log_min_p;
  int top_k, num_top;
  bool report, greedy, cuts_count, cuts_mass, lists;
};

// What a thread saw of a row: its largest logit, that token, and whether any was NaN or +inf.
struct Best {
  float value;
  int token;
  bool broken;
};

KILN_NOINLINE Best find_best(const Logits& row) {
  float best = minus_infinity();
  int unit = 0;
  bool broken = false;
  auto look = [&](int u, const float (&x)[kUnit]) {
    const float m = largest(x);
    if (m > best) best = m, unit = u;
  };
  auto unpack = [&](const Chunk<SCALAR_T>& chunk, float (&x)[kUnit]) {
    chunk.unpack(x);
#pragma unroll
    for (int k = 0; k < kUnit; ++k) broken |= !(x[k] < infinity());
  };
  const int step = blockDim.x, units = row.num_units();
  const int fast = row.hidden == nullptr ? row.num_whole_units() : 0;
  int u = threadIdx.x;
#pragma unroll 1
  for (; u + 3 * step < fast; u += 4 * step) {  // four loads in flight: this pass waits for DRAM
    Chunk<SCALAR_T> chunks[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) chunks[i] = row.load(u + i * step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[kUnit];
      unpack(chunks[i], x);
      look(u + i * step, x);
    }
  }
  Chunk<SCALAR_T> next;
  if (u < units) next = row.fetch(u);
#pragma unroll 1
  for (; u < units; u += step) {
    float x[kUnit];
    unpack(next, x);
    if (u + step < units) next = row.fetch(u + step);
    row.hide(u, x);
    look(u, x);
  }
  int token = 0;
  if (best > minus_infinity()) {
    float x[kUnit];
    row.fetch(unit).unpack(x);
    row.hide(unit, x);
#pragma unroll
    for (int k = kUnit - 1; k >= 0; --k) token = x[k] == best ? unit * kUnit + k : token;
  }
  row.each_edit([&](int t, float x) {
    if (x > best || (x == best && t < token)) best = x, token = t;
  });
  return {best, token, broken};
}

// 0, or what is wrong with a row that has a NaN, +inf, or nothing to draw.
KILN_NOINLINE int error_of(const Logits& row, bool broken, float top) {
  bool nan = false;
  if (broken)
#pragma unroll 1
    for (int i = threadIdx.x; i < row.vocab; i += blockDim.x) nan |= row.at(i) != row.at(i);
  if (__syncthreads_or(nan)) return kNan;
  if (broken || !(top < infinity())) return kInfinite;
  return top > minus_infinity() ? 0 : kNothing;
}

// Sort the largest logits into s.sorted, `wanted` of them if there are so many and a few more: all
// whose key is at least s.bound, s.listed of them, or too many for the list. Add up the row's
// masses under two scales, that which draws and that of the plain softmax, where they are not 0.
KILN_NOINLINE void gather(const Logits& row, float best, float top, int wanted, float drawn,
                          float plain, SamplerShared& s) {
  uint32_t bound = lowest_key();
  if (row.vocab + row.edits.last - row.edits.first > kCandidates)
    bound = bound_of(best, top, min(wanted, int(blockDim.x) / 2), kGrain);
  const float least = value_of(bound);
  __syncthreads();
  if (threadIdx.x == 0) s.listed = 0, s.bound = bound;
  __syncthreads();
  uint64_t drawn_mass = 0, plain_mass = 0;
  auto list = [&](int token, float x) {
    if (!(x >= least)) return;
    const uint32_t slot = atomicAdd(&s.listed, 1u);
    if (slot < kCandidates) s.list[slot] = entry_of(x, token);
  };
  row.each_unit([&](int u, const float (&x)[kUnit]) {
    const float m = largest(x);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const float scale = i == 0 ? drawn : plain;
      const uint64_t mass = scale == 0.0f ? 0 : Weights{top, scale}.mass(x, m);
      (i == 0 ? drawn_mass : plain_mass) += mass;
    }
    if (m >= least) row.each_of(u, list);
  });
  row.each_edit([&](int token, float x) {
    if (x >= value_of(lowest_key())) drawn_mass += Weights{top, drawn}.mass(x);
    list(token, x);
  });
  drawn_mass = reduce<Sum>(drawn_mass, s.partial);
  plain_mass = reduce<Sum>(plain_mass, s.partial);
  if (threadIdx.x == 0) s.drawn_mass = drawn_mass, s.plain_mass = plain_mass;
  __syncthreads();
  if (s.listed <= kCandidates) sort_list(s.listed, s);
}

// The least key that may be drawn by top-k and top-p, after gather.
KILN_NOINLINE uint32_t cut(const Logits& row, const Settings& want, const Weights& weights,
                           SamplerShared& s) {
  const int listed = s.listed;
  const bool complete = s.bound == lowest_key();
  uint32_t key = lowest_key();
  bool known = listed <= kCandidates && (complete || !want.cuts_count || listed >= want.top_k);
  if (known && want.cuts_count && listed >= want.top_k)
    key = uint32_t(s.sorted[want.top_k - 1] >> 32);
  if (known && want.cuts_mass) {
    const int kept = count_below(listed, [&](int j) { return uint32_t(s.sorted[j] >> 32) >= key; });
    const uint64_t mass = add_up(kept, weights, s);
    const uint64_t limit = share_of(want.top_p, want.cuts_count ? mass : s.drawn_mass);
    const int nucleus = count_below(kept, [&](int j) { return s.above[j] < limit; });
    known = complete || want.cuts_count || mass >= limit;
    if (mass >= limit) key = uint32_t(s.sorted[nucleus - 1] >> 32);
  }
  if (known) return key;
  constexpr uint64_t kUnlimited = ~uint64_t(0);
  key = lowest_key();
  if (want.cuts_count) key = descend(row, weights, want.top_k, kUnlimited, s);
  if (!want.cuts_mass) return key;
  uint64_t total = s.drawn_mass;
  if (want.cuts_count) {
    total = 0;
    const float least = value_of(key);
    row.each_token([&](int, float x) { if (x >= least) total += weights.mass(x); });
    total = reduce<Sum>(total, s.partial);
  }
  return max(key, descend(row, weights, ~0u, share_of(want.top_p, total), s));
}

struct Drawn {
  int token;
  float cutoff;
};

// One token of a row that is not greedy. `best` is what this thread saw, `top` the row's largest
// logit, of `token`.
KILN_NOINLINE Drawn draw(const Logits& row, const Settings& want, int64_t seed, int64_t position,
                         float best, float top, int token, SamplerShared& s) {
  const Weights weights{top, div_rn(kLog2e, want.temperature)};
  float cutoff = value_of(lowest_key()), listed_from = infinity();
  if (want.lists) {
    const int wanted = max(want.cuts_count ? want.top_k : want.cuts_mass ? 256 : 1, want.num_top);
    const float drawn = want.cuts_mass && !want.cuts_count ? weights.scale : 0.0f;
    const bool shared = want.report && row.hidden == nullptr;
    gather(row, best, top, wanted, drawn, shared ? kLog2e : 0.0f, s);
    cutoff = value_of(cut(row, want, weights, s));
    if (s.listed <= kCandidates) listed_from = value_of(s.bound);
  }
  cutoff = fmaxf(cutoff, add_rn(top, mul_rn(want.temperature, want.log_min_p)));
  const Noise noise(seed, position);
  uint64_t arrival;
  if (cutoff >= listed_from) arrival = race_of_list(s.listed, noise, weights, cutoff, s);
  else arrival = race_of_row(row, token, noise, weights, cutoff, s);
  return {int(uint32_t(reduce<Min>(arrival, s.partial))), cutoff};
}

// The likeliest tokens of the plain softmax where equals are too many for the list: one a pass.
KILN_NOINLINE uint64_t next_largest(const Logits& row, uint64_t previous, SamplerShared& s) {
  uint64_t next = 0;
  auto consider = [&](int token, float x) {
    const uint64_t entry = entry_of(x, token);
    if (x > minus_infinity() && entry < previous && entry > next) next = entry;
  };
  row.each_token(consider);
  return reduce<Max>(next, s.partial);
}

// Log-probabilities of the row before any edit, at temperature 1: of the token, and the largest;
// from what gather left of it.
KILN_NOINLINE void report(const Logits& raw, int token, float top, int num_top, int width,
                          float* logprob, int* rank, int* top_tokens, float* top_logprobs,
                          SamplerShared& s) {
  const float x = raw.at(token), log_mass = logf(float(s.plain_mass) * 0x1p-40f);
  const bool complete = s.bound == lowest_key() || int(s.listed) >= num_top;
  const bool sorted = s.listed <= kCandidates && complete;
  const int listed = sorted ? int(s.listed) : 0;
  int larger = 0;
  if (sorted && x >= value_of(s.bound)) {
    larger = count_below(listed, [&](int j) { return value_of_entry(s.sorted[j]) > x; });
  } else {
    uint64_t own = 0;
    raw.each_unit([&](int, const float (&y)[kUnit]) {
#pragma unroll
      for (int k = 0; k < kUnit; ++k) own += y[k] > x;
    });
    larger = int(reduce<Sum>(own, s.partial));
  }
  if (threadIdx.x == 0) *logprob = x - top - log_mass, *rank = larger + 1;
  uint64_t entry = ~uint64_t(0);
#pragma unroll 1
  for (int j = 0; j < width; ++j) {
    if (j < num_top && !sorted) entry = next_largest(raw, entry, s);
    if (threadIdx.x != j % blockDim.x) continue;
    if (sorted) entry = j < listed ? s.sorted[j] : 0;
    const bool there = j < num_top && entry;
    top_tokens[j] = there ? token_of_entry(entry) : -1;
    top_logprobs[j] = there ? value_of_entry(entry) - top - log_mass : minus_infinity();
  }
}

KILN_FN void report_nothing(int width, float* logprob, int* rank, int* top_tokens,
                            float* top_logprobs) {
  if (threadIdx.x == 0) *logprob = 0.0f, *rank = 0;
#pragma unroll 1
  for (int j = threadIdx.x; j < width; j += blockDim.x) {
    top_tokens[j] = -1;
    top_logprobs[j] = minus_infinity();
  }
}

// Write down what is asked for a row, and the row as mask and edits leave it: a bit a token in
// shared memory hides the raw logits of what the mask forbids, and of what is edited and then runs
// beside the row. By all threads; shared, so that nobody keeps it in registers.
KILN_FN void read_row(const SCALAR_T* data, const float* f, const int64_t* keys, const Edits& edits,
                      const uint32_t* allowed, int vocab, int width, Logits& raw, Logits& row,
                      Settings& want) {
  uint32_t* hidden = reinterpret_cast<uint32_t*>(dynamic_shared());
  const bool hides = allowed != nullptr || edits.first != edits.last;
  if (threadIdx.x == 0) {
    const bool greedy = !(f[0] >= 1e-5f) || keys[2] == 1;
    const int top_k = int(min(keys[2], int64_t(vocab)));
    const bool cuts_count = top_k > 0 && top_k < vocab, cuts_mass = f[1] < 1.0f;
    const bool small = vocab + edits.last - edits.first <= kCandidates;
    want = {f[0], f[1], f[2], top_k, int(min(keys[3], int64_t(width))), keys[3] >= 0, greedy,
            cuts_count, cuts_mass, cuts_count || cuts_mass || small};
    const bool aligned = is_vector_aligned(data);
    raw = {data, vocab, aligned, nullptr, nullptr, {}};
    row = raw;
    if (hides)
      row = {data, vocab, aligned, allowed, reinterpret_cast<uint8_t*>(hidden), edits};
  }
  if (hides) {
#pragma unroll 1
    for (int w = threadIdx.x; w < (vocab + 31) / 32; w += blockDim.x)
      hidden[w] = allowed == nullptr ? 0 : ~allowed[w];
    __syncthreads();
#pragma unroll 1
    for (int e = edits.first + int(threadIdx.x); e < edits.last; e += blockDim.x)
      atomicOr(&hidden[edits.tokens[e] / 32], 1u << edits.tokens[e] % 32);
  }
  __syncthreads();
}

}  // namespace

extern "C" __global__ void __launch_bounds__(640)
sample_tokens(int* out_tokens, int* out_errors, float* out_cutoffs, float* out_logprobs,
              int* out_ranks, int* out_top_tokens, float* out_top_logprobs, const SCALAR_T* logits,
              const float* settings, const int64_t* keys, const uint32_t* mask,
              const int* edit_starts, const int* edit_tokens, const int* edit_counts,
              const float* edit_biases, int64_t stride, int32_t vocab, int32_t width) {
  __shared__ SamplerShared s;
  __shared__ Logits raw, row;
  __shared__ Settings want;
  const int64_t r = blockIdx.x;
  const float* f = settings + 6 * r;
  keys += 4 * r;
  Edits edits{edit_tokens, edit_counts, edit_biases, 0, 0, f[3], f[4], f[5]};
  if (edit_starts != nullptr) edits.first = edit_starts[r], edits.last = edit_starts[r + 1];
  const uint32_t* allowed = mask == nullptr ? nullptr : mask + r * ((vocab + 31) / 32);
  read_row(logits + r * stride, f, keys, edits, allowed, vocab, width, raw, row, want);

  const Best best = find_best(row);
  const uint64_t first = reduce<Max>(entry_of(best.value, best.token), s.partial);
  const float top = value_of_entry(first);
  const int error = error_of(row, __syncthreads_or(best.broken), top);
  Drawn drawn{error ? 0 : token_of_entry(first), error ? 0.0f : top};
  if (!error && !want.greedy)
    drawn = draw(row, want, keys[0], keys[1], best.value, top, drawn.token, s);
  if (threadIdx.x == 0)
    out_tokens[r] = drawn.token, out_errors[r] = error, out_cutoffs[r] = drawn.cutoff;

  out_logprobs += r, out_ranks += r, out_top_tokens += r * width, out_top_logprobs += r * width;
  if (error || !want.report)
    return report_nothing(width, out_logprobs, out_ranks, out_top_tokens, out_top_logprobs);
  float raw_best = best.value, raw_top = top;
  if (row.hidden != nullptr) {
    const Best again = find_best(raw);
    raw_best = again.value;
    raw_top = value_of_entry(reduce<Max>(entry_of(raw_best, 0), s.partial));
  }
  if (row.hidden != nullptr || want.greedy || !want.lists)
    gather(raw, raw_best, raw_top, max(want.num_top, 1), 0.0f, kLog2e, s);
  report(raw, drawn.token, raw_top, want.num_top, width, out_logprobs, out_ranks, out_top_tokens,
         out_top_logprobs, s);
}
