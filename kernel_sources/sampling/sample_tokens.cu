// token[r] ~ softmax(edited logits[r, :] / temperature) over what mask, top-k, top-p, min-p leave
//
// logits: [rows, vocab], rows any distance apart and at any alignment; one block a row. settings
// [rows, 6], keys [rows, 4], mask [rows, ceil(vocab / 32)] and the lists of edits are laid out as
// jit_kernels/ops/sampling.py says; a token is edited at most once.
// Compile-time parameters (jit_kernels/ops/sampling.py): LOGITS_T.
//
// 1. One pass over the row finds each thread's largest logit and the mass of the row, nearly, and
//    leaves the largest of every sixteen in shared memory: later steps look there first. A greedy
//    row ends here.
// 2. The m-th largest of the threads' bounds the m-th largest logit from below: what reaches the
//    bound, a few more than m, is listed.
// 3. Histograms of the list decide top-k, and top-p with the mass of the row: nearly known is
//    enough, as long as no cut could lie elsewhere; else what the histogram has counted exactly is
//    told from the rest. Where the list does not reach far enough, a longer one or histograms of
//    the row decide.
// 4. What is left runs a race; the first to arrive is the token. Over a whole row few tokens draw
//    a number: see race.cuh.
// Masses are integers and a race has one winner, so no step can tell how the work was cut up:
// block size, schedule and neighbours leave every bit of the result alone.
#include "sampling/likely.cuh"
#include "kiln/ptx/launch.cuh"
#include "sampling/survey.cuh"

#ifndef LOGITS_T  // defaults, so that an editor can parse this file on its own
#define LOGITS_T kiln::bf16
#endif

namespace {
using namespace kiln;
using Logits = Row<LOGITS_T>;
constexpr int kFastBits = kFreeBits<LOGITS_T> ? 19 : 18;  // of a nearly known mass that hold
constexpr int kLikely = 288;  // logits that mostly hold a top-p: some 450 are listed
enum Error : int { kNan = 1, kInfinite = 2, kNothing = 4 };

// A mass that is off by no more than `error`.
struct Nearly {
  uint64_t mass, error;

  // Of the first pass: nearer than 2^-19 of it. A power, its unit's sum, and the power of the largest
  // logit are off by 2^-22 each, smaller things by as much together. The weight that it stands for
  // is off by up to four times that: where few are large and many small, the differences of logits
  // are rounded alike. Twice as much is allowed for float32. And each weight is rounded down to a
  // step.
  KILN_FN static Nearly of(uint64_t mass, int vocab) {
    return {mass, (mass >> kFastBits) + uint64_t(vocab)};
  }
  // This, the rest of a row, and what was counted and edited, exactly. But the rest of units that
  // counted was rounded by itself, to 2^-23 of the power of two next to their largest weights.
  KILN_FN Nearly and_exact(uint64_t counted, uint64_t edited) const {
    return {mass + counted + edited, error + (counted >> 23)};
  }
};

// What is wrong with a row that has a NaN or +inf, or whose largest logit is not finite.
KILN_NOINLINE int error_of(const Logits& row, bool broken, float top) {
  bool nan = false;
  if (broken)
#pragma unroll 1
    for (int i = threadIdx.x; i < row.vocab; i += blockDim.x) nan |= row.at(i) != row.at(i);
  if (__syncthreads_or(nan)) return kNan;
  return top == minus_infinity() ? kNothing : kInfinite;
}

// So many threads' largest bound a list at the most: of 384, some 700 logits.
KILN_FN int most_wanted() { return int(blockDim.x) * 3 / 4; }

// List the largest logits, `wanted` of them if there are so many and a few more.
KILN_NOINLINE void gather(const Logits& row, Peaks peaks, float best, float top, int wanted,
                          SamplerShared& s) {
  uint32_t bound = lowest_key();
  if (row.vocab + row.edits.last - row.edits.first > kCandidates) {
    bound = bound_of(best, top, min(wanted, most_wanted()), s);
    if (threadIdx.x == 0) s.wanted = wanted;
  }
  list_from(row, peaks, bound, s);
}

// Whether no token is below what is listed.
KILN_FN bool lists_all(const SamplerShared& s) { return s.bound == lowest_key(); }

// The mass of the edited tokens, but for those from some logit on.
KILN_NOINLINE uint64_t mass_of_edits(const Logits& row, Weights weights, float below,
                                     SamplerShared& s) {
  uint64_t mass = 0;
  if (!row.has_edits()) return mass;
  row.each_edit([&](int, float x) { mass += x < below ? weights.mass(x) : 0; });
  return sums_of({mass, 0}, s.row).a;
}

// The largest key in the list below another; 0: there is none.
KILN_FN uint32_t next_listed(uint32_t key, SamplerShared& s) {
  uint64_t next = 0;
#pragma unroll 1
  for (int j = threadIdx.x; j < int(s.listed); j += blockDim.x)
    if (uint32_t(s.list[j] >> 32) < key) next = max(next, s.list[j] >> 32);
  return uint32_t(largest_of(next, s.next));
}

// A key that top-p does not go below, of a row of some mass: tokens of less than an even share of
// half of what it leaves out are cut, however many.
KILN_NOINLINE uint32_t base_of(const Logits& row, float top_p, Weights weights, uint64_t mass) {
  const float rest = 1.0f - top_p;
  if (!(rest > 0x1p-16f)) return lowest_key();
  const int tokens = row.vocab + row.edits.last - row.edits.first;
  const float share = rest * float(mass) / float(tokens);
  return max(lowest_key(), key_of(weights.logit_below(log2_fast(share) - 41.0f)));
}

// The least key that may be drawn by top-k and top-p, after gather.
KILN_NOINLINE uint32_t cut(const Logits& row, Peaks peaks, const Settings& want, Weights weights,
                           const Seen& seen, SamplerShared& s) {
  const bool reaches = lists_all(s) || !want.cuts_count || int(s.listed) >= want.top_k;
  bool in_list = s.listed <= kCandidates && reaches;
  uint32_t found = lowest_key();
  if (want.cuts_count) {
    const Limits limits{uint32_t(want.top_k), ~uint64_t(0), found, want.cuts_mass};
    found = descend(row, peaks, in_list, weights, limits, s);
  }
  if (!want.cuts_mass) return found;
  // Of what top-k left; or of the row, nearly: that is enough unless a cut is just where it counts.
  Nearly all = {0, 0};
  bool nearly = false;
  if (want.cuts_count) {
    all.mass = s.kept;
  } else if (seen.mass) {
    all = Nearly::of(seen.mass, row.vocab);
    all.mass += mass_of_edits(row, weights, infinity(), s);
    nearly = true;
  } else {
    all.mass = sum_of_row(row, peaks, weights, s);
  }
  for (;;) {
    const uint64_t low = share_of(want.top_p, all.mass - all.error);
    const uint32_t base = in_list ? 0 : base_of(row, want.top_p, weights, all.mass);
    found = descend(row, peaks, in_list, weights, {~0u, low, base, true}, s);
    if (in_list && !lists_all(s) && s.kept < low) {  // it is too short
      in_list = s.wanted < most_wanted() && s.kept > low - low / 8;  // by little
      if (in_list) gather(row, peaks, seen.value, weights.top, most_wanted(), s);
      in_list &= s.listed <= kCandidates;
      continue;
    }
    auto enough = [&](uint64_t kept) { return kept >= share_of(want.top_p, all.mass + all.error); };
    if (all.error == 0 || enough(s.kept)) return found;
    if (nearly) {  // most of it is known by now: only the rest of the row is not
      const uint32_t from = in_list ? max(s.total_from, s.bound) : s.total_from;
      const uint64_t known = seen_from(row, peaks, from, weights.top, want.plan.scale, s);
      all = Nearly::of(seen.mass - min(seen.mass, known), row.vocab);
      all = all.and_exact(s.total, mass_of_edits(row, weights, value_of(from), s));
      if (from <= lowest_key()) all = {s.total, 0};
      nearly = false;
      if (enough(s.kept)) return found;
    }
    if (s.kept >= share_of(want.top_p, all.mass - all.error)) {  // and so perhaps too many
      all = {sum_of_row(row, peaks, weights, s), 0};
      if (enough(s.kept)) return found;
    }
    if (in_list) {
      const uint32_t next = next_listed(found, s);
      if (next && enough(s.kept + weights.mass(value_of(next)))) return next;
    }
  }
}

struct Drawn {
  int token;
  float cutoff;
};

// One token of a row that is not greedy.
KILN_NOINLINE Drawn draw(const Logits& row, Peaks peaks, const Settings& want, const Seen& seen,
                         SamplerShared& s) {
  const float top = value_of_entry(seen.first);
  const Weights weights{top, want.temperature};
  float cutoff = value_of(lowest_key()), listed_from = infinity();
  if (want.lists) {
    const int wanted = want.cuts_count ? want.top_k : want.cuts_mass ? kLikely : 1;
    gather(row, peaks, seen.value, top, max(wanted, want.num_top), s);
    cutoff = value_of(cut(row, peaks, want, weights, seen, s));
    if (s.listed <= kCandidates) listed_from = value_of(s.bound);
  }
  cutoff = fmaxf(cutoff, add_rn(top, mul_rn(want.temperature, want.log_min_p)));
  const Noise noise = Noise::of(want.plan.seed, want.plan.position);
  const Visitor race{Visit::race, cutoff, weights, noise.row};
  uint64_t arrival;
  if (cutoff < listed_from && !want.plan.races && s.kept_count <= kCandidates) {
    list_from(row, peaks, key_of(cutoff), s);
    if (s.listed <= kCandidates) listed_from = cutoff;
  }
  if (cutoff >= listed_from) {
    arrival = race_of_list(race, s);
  } else {
    if (!want.plan.races) {
      find_lows(noise, row.vocab, s);
      __syncthreads();
    }
    arrival = race_of_row(row, peaks, seen.value, seen.own_token(row), race, s);
  }
  return {int(uint32_t(~largest_of(~arrival, s.arrival))), cutoff};
}

// Log-probabilities of the row before any edit, at temperature 1: of the token, and the largest;
// from what gather left of it.
KILN_NOINLINE void report(const Logits& raw, Peaks peaks, int token, const Seen& seen, int num_top,
                          int width, float* logprob, int* rank, int* top_tokens,
                          float* top_logprobs, SamplerShared& s) {
  const float x = raw.at(token), top = value_of_entry(seen.first);
  const bool usable = s.listed <= kCandidates && (lists_all(s) || int(s.listed) >= num_top);
  const uint64_t mass = seen.mass ? seen.mass : sum_of_row(raw, peaks, {top, 1.0f}, s);
  const float log_mass = 0.69314718f * (log2_fast(float(mass)) - 40.0f);
  const bool in_list = usable && x >= value_of(s.bound);
  const Weights plain{top, 1.0f};
  int larger = 0;
  if (in_list) {
#pragma unroll 1
    for (int j = threadIdx.x; j - int(threadIdx.x) < int(s.listed); j += blockDim.x)
      larger += __syncthreads_count(j < int(s.listed) && value_of_entry(s.list[j]) > x);
  } else {
    const float above = value_of(key_of(x) + 1);
    const uint64_t own = visit(raw, peaks, false, {Visit::count, above, plain}, s);
    larger = int(sums_of({own, 0}, s.survey).a);  // of s.row the mass may still be read
  }
  if (threadIdx.x == 0) *logprob = x - top - log_mass, *rank = larger + 1;
  int listed = kSorted + 1;
  if (usable) {
    uint32_t from = s.bound;
    if (s.listed > kFew && num_top <= int(blockDim.x) / 2)
      from = max(from, bound_of(seen.value, top, max(num_top, 1), s));
    listed = sort_from(from, s);
  }
  const bool sorted = listed <= kSorted;
  uint64_t entry = ~uint64_t(0);
#pragma unroll 1
  for (int j = sorted ? int(threadIdx.x) : 0; j < width; j += sorted ? int(blockDim.x) : 1) {
    if (sorted) entry = j < listed ? s.sorted[j] : 0;
    else if (j < num_top) entry = next_largest(raw, peaks, plain, entry, s);
    if (!sorted && threadIdx.x != 0) continue;
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

}  // namespace

extern "C" __global__ void __launch_bounds__(512, 1)
sample_tokens(int* out_tokens, int* out_errors, float* out_cutoffs, float* out_logprobs,
              int* out_ranks, int* out_top_tokens, float* out_top_logprobs, const LOGITS_T* logits,
              const float* settings, const int64_t* keys, const uint32_t* mask,
              const int* edit_starts, const int* edit_tokens, const int* edit_counts,
              const float* edit_biases, int64_t stride, int32_t vocab, int32_t width) {
  kiln::take_turn();
  __shared__ SamplerShared s;
  __shared__ Logits raw, row;
  __shared__ Settings want;
  const int64_t r = blockIdx.x;
  const int t = threadIdx.x, words = (vocab + 31) / 32;
  Edits edits{edit_tokens, edit_counts, edit_biases, 0, 0, 0.0f, 0.0f, 0.0f};
  if (edit_starts != nullptr) {
    const float* f = settings + 6 * r;
    edits = {edit_tokens, edit_counts, edit_biases, edit_starts[r], edit_starts[r + 1],
             f[3], f[4], f[5]};
  }
  const LOGITS_T* data = logits + r * stride;
  const uint32_t* allowed = mask == nullptr ? nullptr : mask + r * words;
  const bool hides = allowed != nullptr || edits.first != edits.last;
  uint8_t* hidden = hides ? dynamic_shared() : nullptr;
  if (t == 0) {  // for later steps; shared, so that nobody keeps them in registers
    raw = {data, vocab, is_vector_aligned(data), nullptr, nullptr, {}};
    row = {data, vocab, is_vector_aligned(data), allowed, hidden, edits};
  }
  const bool may_hide = mask != nullptr || edit_starts != nullptr;
  const Peaks peaks((vocab + kUnit - 1) / kUnit, may_hide ? 4 * words : 0);

  Drawn drawn{0, 0.0f};
  Seen seen;
  const Logits* from = &row;
#pragma unroll 1
  for (bool again = false;; again = true) {
    seen = survey(data, vocab, *from, peaks, settings + 6 * r, keys + 4 * r, width, hides, again,
                  want, s);
    if (again) break;
    const float top = value_of_entry(seen.first);
    const bool fine = top > minus_infinity() && top < infinity();
    const int error = fine ? 0 : error_of(row, seen.first == ~uint64_t(0), top);
    if (fine && want.greedy) drawn = {seen.first_token(row), top};
    else if (fine) drawn = draw(row, peaks, want, seen, s);
    if (t == 0)
      out_tokens[r] = drawn.token, out_errors[r] = error, out_cutoffs[r] = drawn.cutoff;
    if (error || !want.report)
      return report_nothing(width, out_logprobs + r, out_ranks + r, out_top_tokens + r * width,
                            out_top_logprobs + r * width);
    if (row.hidden == nullptr && want.plan.scale == kPlainScale) break;
    __syncthreads();  // once more, as the row came
    from = &raw;
  }
  // What was listed for the draw may do.
  const int likely = max(want.num_top, 1);
  if (row.hidden != nullptr || int(s.listed) < likely || s.listed > kCandidates)
    gather(raw, peaks, seen.value, value_of_entry(seen.first), likely, s);
  report(raw, peaks, drawn.token, seen, want.num_top, width, out_logprobs + r, out_ranks + r,
         out_top_tokens + r * width, out_top_logprobs + r * width, s);
}
