// Lists the logit edits of each row for sample_tokens. The edits of row r are the elements from
// spans[r][0] to spans[r][1] - 1 of the arrays tokens, counts and biases. Their order is not fixed.
//   each fixed token of the row, with its bias
//   every other token that occurs in the first lengths[r] tokens of the row's request, with bias 0
// counts: how often the token occurs from position `prompt` on; 0: only before it; -1: nowhere.
//
// jobs: [rows] Job. lengths: [rows] int64. fixed_tokens and fixed_biases: [num_fixed], the lists of
// all rows, one after the other. A row lists a token once at most. token_pool: [num_slots], the
// token in each slot of the KV pool. tables: [max_requests, max_blocks], the KV blocks of each
// request. count_table: [blocks, vocab], which holds zeros before and after the launch. No
// compile-time parameters.
//
// Work split: each block takes every gridDim.x-th row. First it counts the tokens of the request in
// its row of `count_table`. Then the thread that takes a count out of there lists the token, and
// leaves a zero.
// Memory: blocks share nothing. Within a block, counting and listing are a barrier apart.
// Callers: there is room for num_fixed + min(length, vocab) elements from a row's `first` on. A
// count is less than 2^30.
#include "kiln/ptx/launch.cuh"

namespace {

constexpr uint32_t kPrompt = 1u << 30;  // added to the count of a token that the prompt contains

struct Job {
  int row;        // of tables
  int counts;     // whether tokens of the request are counted; 0: the fixed tokens alone
  int prompt;     // how many tokens of it are the prompt
  int first;      // the row's first element of the outputs
  int fixed;      // its first fixed token
  int num_fixed;
};

}  // namespace

extern "C" __global__ void __launch_bounds__(512)
token_edits(int32_t* spans, int32_t* tokens, int32_t* counts, float* biases, uint32_t* count_table,
            const int32_t* jobs, const int64_t* lengths, const int32_t* fixed_tokens,
            const float* fixed_biases, const int32_t* token_pool, const int32_t* tables, int rows,
            int vocab, int64_t tables_row, int block_size) {
  kiln::pdl_wait_then_trigger();
  __shared__ int listed;
  const int thread = threadIdx.x, threads = blockDim.x;
  uint32_t* own = count_table + int64_t(blockIdx.x) * vocab;
  for (int r = blockIdx.x; r < rows; r += gridDim.x) {
    const Job job = reinterpret_cast<const Job*>(jobs)[r];
    const int32_t* blocks = tables + job.row * tables_row;
    const int length = job.counts ? int(lengths[r]) : 0;
    auto token_at = [&](int position) {
      return token_pool[int64_t(blocks[position / block_size]) * block_size +
                         position % block_size];
    };
    auto list = [&](int place, int token, uint32_t count, float bias) {
      tokens[job.first + place] = token;
      counts[job.first + place] = count == 0 ? -1 : int(count & (kPrompt - 1));
      biases[job.first + place] = bias;
    };
    for (int i = thread; i < length; i += threads) {
      if (i < job.prompt) atomicOr(&own[token_at(i)], kPrompt);
      else atomicAdd(&own[token_at(i)], 1u);
    }
    if (thread == 0) listed = job.num_fixed;
    __syncthreads();
    for (int i = thread; i < job.num_fixed; i += threads) {
      const int token = fixed_tokens[job.fixed + i];
      list(i, token, atomicExch(&own[token], 0u), fixed_biases[job.fixed + i]);
    }
    __syncthreads();
    for (int i = thread; i < length; i += threads) {
      const int token = token_at(i);
      const uint32_t count = atomicExch(&own[token], 0u);
      if (count) list(atomicAdd(&listed, 1), token, count, 0.0f);
    }
    __syncthreads();
    if (thread == 0) spans[2 * r] = job.first, spans[2 * r + 1] = job.first + listed;
  }
}
