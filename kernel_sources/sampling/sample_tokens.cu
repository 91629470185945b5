// token[r] ~ softmax(edited logits[r, :] / temperature) within mask, top-k, top-p and min-p
// logits: [rows, vocab], any row stride and alignment. settings [rows, 6], keys [rows, 4], mask
// [rows, ceil(vocab / 32)] and the lists of edits are laid out as in
// jit_kernels/ops/sampling/functions.py; a row edits a token at most once. Compile-time parameters
// (jit_kernels/ops/sampling/spec.py): LOGITS_T.
//
// Work split: one block per row, in four steps.
// 1. survey: one pass over the row finds each thread's largest logit, the row's approximate mass
// (sum of weights), and in shared memory the largest logit of each unit of 16 tokens, so that later
// steps can skip units. A greedy row ends here.
// 2. gather: the m-th largest of the threads' maxima is at most the m-th largest logit. All logits
// from this bound on, a few more than m, go into a list.
// 3. cut: histograms of the list decide top-k, and with the row's mass top-p. The approximate mass
// suffices unless its error could move the cut. Then the exact mass of the counted keys replaces
// their part of it. If the list is too short, a longer one or histograms of the row decide.
// 4. draw: the remaining tokens run an exponential race, and the first to arrive is drawn. In a
// race over a whole row few tokens need a random number: see race.cuh.
// Masses are integers and a race has one winner, so a row's bits do not depend on the block size,
// the schedule or other rows.
#include "sampling/likely.cuh"
#include "kiln/ptx/launch.cuh"
#include "sampling/survey.cuh"

#ifndef LOGITS_T  // defaults, so that an editor can parse this file on its own
#define LOGITS_T kiln::bf16
#endif

namespace {
using namespace kiln;
using Logits = Row<LOGITS_T>;
constexpr int kFastBits = kFreeBits<LOGITS_T> ? 19 : 18;  // correct bits of an approximate mass
constexpr int kLikely = 288;  // logits that usually suffice for top-p; about 450 get listed
enum Error : int { kNan = 1, kInfinite = 2, kNothing = 4 };

// An approximate mass, and a bound of its error.
struct ApproximateMass {
  uint64_t mass, error;

  // The first pass errs by at most 2^-19 of the mass. Exponentials, unit sums and the exponential
  // of the largest logit err by 2^-22 each, all else together by as much. The exact weights err by
  // up to 2^-20, if many small logits all round alike. float32 is allowed twice as much. Each
  // weight is also rounded down to a step of the mass.
  KILN_FN static ApproximateMass of(uint64_t mass, int vocab) {
    return {mass, (mass >> kFastBits) + uint64_t(vocab)};
  }
  // Add exact masses to this, the mass of the rest. The rest of a partly counted unit was rounded
  // separately, to 2^-23 of the power of two next to its largest weight.
  KILN_FN ApproximateMass plus_exact(uint64_t counted, uint64_t edited) const {
    return {mass + counted + edited, error + (counted >> 23)};
  }
};

// Return the error of a row that has NaN or +inf, or whose largest logit is not finite.
KILN_NOINLINE int error_of(const Logits& row, bool broken, float top) {
  bool nan = false;
  if (broken)
#pragma unroll 1
    for (int i = threadIdx.x; i < row.vocab; i += blockDim.x) nan |= row.at(i) != row.at(i);
  if (__syncthreads_or(nan)) return kNan;
  return top == minus_infinity() ? kNothing : kInfinite;
}

// Upper limit of `wanted` for a bound from the threads' maxima; 384 lists about 700 logits.
KILN_FN int most_wanted() { return int(blockDim.x) * 3 / 4; }

// List the `wanted` largest logits, or all if the row has fewer, and a few more.
KILN_NOINLINE void gather(const Logits& row, Peaks peaks, float best, float top, int wanted,
                          SamplerShared& s) {
  uint32_t bound = lowest_key();
  if (row.vocab + row.edits.last - row.edits.first > kCandidates) {
    bound = bound_of(best, top, min(wanted, most_wanted()), s);
    if (threadIdx.x == 0) s.wanted = wanted;
  }
  list_from(row, peaks, bound, s);
}

// Whether the list holds every token.
KILN_FN bool lists_all(const SamplerShared& s) { return s.bound == lowest_key(); }

// Return the mass of the edited tokens with logits below `below`.
KILN_NOINLINE uint64_t mass_of_edits(const Logits& row, Weights weights, float below,
                                     SamplerShared& s) {
  uint64_t mass = 0;
  if (!row.has_edits()) return mass;
  row.each_edit([&](int, float x) { mass += x < below ? weights.mass(x) : 0; });
  return sums_of({mass, 0}, s.row).a;
}

// Return the largest key in the list that is below `key`; 0: none.
KILN_FN uint32_t next_listed(uint32_t key, SamplerShared& s) {
  uint64_t next = 0;
#pragma unroll 1
  for (int j = threadIdx.x; j < int(s.listed); j += blockDim.x)
    if (uint32_t(s.list[j] >> 32) < key) next = max(next, s.list[j] >> 32);
  return uint32_t(largest_of(next, s.next));
}

// Lower bound of top-p's cutoff key in a row of this mass. Tokens that each have less than an even
// share of half the mass that top-p leaves out are cut, however many they are.
KILN_NOINLINE uint32_t base_of(const Logits& row, float top_p, Weights weights, uint64_t mass) {
  const float rest = 1.0f - top_p;
  if (!(rest > 0x1p-16f)) return lowest_key();
  const int tokens = row.vocab + row.edits.last - row.edits.first;
  const float share = rest * float(mass) / float(tokens);
  return max(lowest_key(), key_of(weights.logit_below(log2_fast(share) - 41.0f)));
}

// Return the cutoff key of top-k and top-p. Call after gather.
KILN_NOINLINE uint32_t cut(const Logits& row, Peaks peaks, const Settings& want, Weights weights,
                           const RowSummary& summary, SamplerShared& s) {
  const bool reaches = lists_all(s) || !want.cuts_count || int(s.listed) >= want.top_k;
  bool in_list = s.listed <= kCandidates && reaches;
  uint32_t found = lowest_key();
  if (want.cuts_count) {
    const Limits limits{uint32_t(want.top_k), ~uint64_t(0), found, want.cuts_mass};
    found = cut_key(row, peaks, in_list, weights, limits, s);
  }
  if (!want.cuts_mass) return found;
  // Total mass for top-p: of what top-k left, or of the row, approximately unless that is
  // ambiguous.
  ApproximateMass all = {0, 0};
  bool approximate = false;
  if (want.cuts_count) {
    all.mass = s.kept;
  } else if (summary.mass) {
    all = ApproximateMass::of(summary.mass, row.vocab);
    all.mass += mass_of_edits(row, weights, infinity(), s);
    approximate = true;
  } else {
    all.mass = sum_of_row(row, peaks, weights, s);
  }
  for (;;) {
    const uint64_t low = share_of(want.top_p, all.mass - all.error);
    const uint32_t base = in_list ? 0 : base_of(row, want.top_p, weights, all.mass);
    found = cut_key(row, peaks, in_list, weights, {~0u, low, base, true}, s);
    if (in_list && !lists_all(s) && s.kept < low) {  // the list is too short
      in_list = s.wanted < most_wanted() && s.kept > low - low / 8;  // only by a little
      if (in_list) gather(row, peaks, summary.value, weights.top, most_wanted(), s);
      in_list &= s.listed <= kCandidates;
      continue;
    }
    auto enough = [&](uint64_t kept) { return kept >= share_of(want.top_p, all.mass + all.error); };
    if (all.error == 0 || enough(s.kept)) return found;
    if (approximate) {  // now exact for the counted keys, approximate for the rest
      const uint32_t from = in_list ? max(s.total_from, s.bound) : s.total_from;
      const uint64_t known = mass_from(row, peaks, from, weights.top, want.plan.scale, s);
      all = ApproximateMass::of(summary.mass - min(summary.mass, known), row.vocab);
      all = all.plus_exact(s.total, mass_of_edits(row, weights, value_of(from), s));
      if (from <= lowest_key()) all = {s.total, 0};
      approximate = false;
      if (enough(s.kept)) return found;
    }
    if (s.kept >= share_of(want.top_p, all.mass - all.error)) {  // still ambiguous: sum exactly
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

// Draw a token of a row that is not greedy.
KILN_NOINLINE Drawn draw(const Logits& row, Peaks peaks, const Settings& want,
                         const RowSummary& summary, SamplerShared& s) {
  const float top = value_of_entry(summary.first);
  const Weights weights{top, want.temperature};
  float cutoff = value_of(lowest_key()), listed_from = infinity();
  if (want.lists) {
    const int wanted = want.cuts_count ? want.top_k : want.cuts_mass ? kLikely : 1;
    gather(row, peaks, summary.value, top, max(wanted, want.num_top), s);
    cutoff = value_of(cut(row, peaks, want, weights, summary, s));
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
    arrival = race_of_row(row, peaks, summary.value, summary.own_token(row), race, s);
  }
  return {int(uint32_t(~largest_of(~arrival, s.arrival))), cutoff};
}

// Report log-probabilities of the unedited row at temperature 1: of the token, and of the most
// likely ones. Uses the list that gather left if it suffices.
KILN_NOINLINE void report(const Logits& raw, Peaks peaks, int token, const RowSummary& summary,
                          int num_top, int width, float* logprob, int* rank, int* top_tokens,
                          float* top_logprobs, SamplerShared& s) {
  const float x = raw.at(token), top = value_of_entry(summary.first);
  const bool usable = s.listed <= kCandidates && (lists_all(s) || int(s.listed) >= num_top);
  const uint64_t mass = summary.mass ? summary.mass : sum_of_row(raw, peaks, {top, 1.0f}, s);
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
    larger = int(sums_of({own, 0}, s.survey).a);  // s.row may still be in use by sum_of_row
  }
  if (threadIdx.x == 0) *logprob = x - top - log_mass, *rank = larger + 1;
  int listed = kSorted + 1;
  if (usable) {
    uint32_t from = s.bound;
    if (s.listed > kFew && num_top <= int(blockDim.x) / 2)
      from = max(from, bound_of(summary.value, top, max(num_top, 1), s));
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
sample_tokens(int* tokens, int* errors, float* cutoffs, float* logprobs, int* ranks,
              int* top_tokens, float* top_logprobs, const LOGITS_T* logits, const float* settings,
              const int64_t* keys, const uint32_t* mask, const int* edit_spans,
              const int* edit_tokens, const int* edit_counts, const float* edit_biases,
              int64_t logits_stride, int32_t vocab, int32_t width) {
  kiln::pdl_wait_then_trigger();
  __shared__ SamplerShared s;
  __shared__ Logits raw, row;
  __shared__ Settings want;
  const int64_t r = blockIdx.x;
  const int t = threadIdx.x, words = (vocab + 31) / 32;
  Edits edits{edit_tokens, edit_counts, edit_biases, 0, 0, 0.0f, 0.0f, 0.0f};
  if (edit_spans != nullptr) {
    const float* f = settings + 6 * r;
    edits = {edit_tokens, edit_counts, edit_biases, edit_spans[2 * r],
             edit_spans[2 * r + 1], f[3], f[4], f[5]};
  }
  const LOGITS_T* data = logits + r * logits_stride;
  const uint32_t* allowed = mask == nullptr ? nullptr : mask + r * words;
  const bool hides = allowed != nullptr || edits.first != edits.last;
  uint8_t* hidden = hides ? dynamic_shared() : nullptr;
  if (t == 0) {  // for later steps; in shared memory to save registers
    raw = {data, vocab, is_vector_aligned(data), nullptr, nullptr, {}};
    row = {data, vocab, is_vector_aligned(data), allowed, hidden, edits};
  }
  const bool may_hide = mask != nullptr || edit_spans != nullptr;
  const Peaks peaks((vocab + kUnit - 1) / kUnit, may_hide ? 4 * words : 0);

  Drawn drawn{0, 0.0f};
  RowSummary summary;
  const Logits* from = &row;
#pragma unroll 1
  for (bool again = false;; again = true) {
    summary = survey(data, vocab, *from, peaks, settings + 6 * r, keys + 4 * r, width, hides, again,
                     want, s);
    if (again) break;
    const float top = value_of_entry(summary.first);
    const bool fine = top > minus_infinity() && top < infinity();
    const int error = fine ? 0 : error_of(row, summary.first == ~uint64_t(0), top);
    if (fine && want.greedy) drawn = {summary.first_token(row), top};
    else if (fine) drawn = draw(row, peaks, want, summary, s);
    if (t == 0) tokens[r] = drawn.token, errors[r] = error, cutoffs[r] = drawn.cutoff;
    if (error || !want.report)
      return report_nothing(width, logprobs + r, ranks + r, top_tokens + r * width,
                            top_logprobs + r * width);
    if (row.hidden == nullptr && want.plan.scale == kPlainScale) break;
    __syncthreads();  // next, survey the unedited row
    from = &raw;
  }
  // The list made for the draw may suffice.
  const int likely = max(want.num_top, 1);
  if (row.hidden != nullptr || int(s.listed) < likely || s.listed > kCandidates)
    gather(raw, peaks, summary.value, value_of_entry(summary.first), likely, s);
  report(raw, peaks, drawn.token, summary, want.num_top, width, logprobs + r, ranks + r,
         top_tokens + r * width, top_logprobs + r * width, s);
}
