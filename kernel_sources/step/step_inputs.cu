// The inputs of a step, from one message. For request r with tokens t = 0 .. count-1:
//   positions[first + t] = start + t;  slot_mapping[first + t] = block * block_size + place
//   token_ids[first + t] = a token of the message, or the token that was sampled last for r
//   token_pool[slot_mapping[first + t]] = token_ids[first + t]
//
// message: [words] int32, aligned to 8 bytes: kHeader words (requests, tokens, samples, 0), a
// Record for each request, then the lists that records point into. tables: [rows, max_blocks], the
// blocks of every request that has a row; a record's new blocks are added first. block_table:
// [requests, max_blocks], the table rows of the step's requests, in their order. sampled: [rows]
// int32, the tokens that the step before sampled. token_pool: [num_slots], the token of each slot
// of the KV pool. Outputs may be longer than the step (a captured graph has fixed sizes). The rest
// is padding without effect: slot -1, length 0, greedy sampling of token 0's logits. No compile-time
// parameters.
//
// Work split: one block per request, padding included; all blocks share the padding of tokens and
// samples.
// Memory: only a request's own block accesses its table row, with one block barrier between adding
// blocks and reading the row.
// Callers: no two requests have the same row, or write the same slot; the outputs are large enough
// for the step.
#include "kiln/ptx/launch.cuh"

namespace {

constexpr int kHeader = 4, kSettings = 6, kKeys = 4;

struct Record {
  int row;         // of tables
  int start;       // position of the first token
  int count;       // tokens of this step
  int first;       // index of the first token in the step
  int tokens_at;   // place of the tokens in the message; -1: the token is sampled[source]
  int source;
  int blocks_at;   // place of the new blocks in the message
  int num_blocks;  // blocks that the table row has already
  int num_new;     // new blocks
  int sample;      // index of the sample; -1: none
  float settings[kSettings];
  int64_t keys[kKeys];
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
step_inputs(int64_t* token_ids, int64_t* positions, int64_t* slot_mapping, int32_t* cu_seqlens_q,
            int32_t* seq_lens, int64_t* sample_rows, float* settings, int64_t* keys,
            int32_t* block_table, int32_t* tables, int32_t* token_pool, const int32_t* message,
            const int32_t* sampled, int requests, int tokens, int samples, int64_t table_row,
            int64_t tables_row, int block_size) {
  kiln::pdl_writes_plan();
  const int thread = threadIdx.x, threads = blockDim.x, request = blockIdx.x;
  const int used = message[0], used_tokens = message[1], used_samples = message[2];
  if (request == 0 && thread == 0) cu_seqlens_q[0] = 0;
  if (request < used) {
    const Record& own = reinterpret_cast<const Record*>(message + kHeader)[request];
    int32_t* blocks = tables + own.row * tables_row;
    for (int i = thread; i < own.num_new; i += threads)
      blocks[own.num_blocks + i] = message[own.blocks_at + i];
    __syncthreads();
    for (int t = thread; t < own.count; t += threads) {
      const int position = own.start + t;
      const int token = own.tokens_at < 0 ? sampled[own.source] : message[own.tokens_at + t];
      token_ids[own.first + t] = token;
      positions[own.first + t] = position;
      const int64_t slot =
          int64_t(blocks[position / block_size]) * block_size + position % block_size;
      slot_mapping[own.first + t] = slot;
      token_pool[slot] = token;
    }
    const int length = own.start + own.count;
    for (int i = thread; i * block_size < length; i += threads)
      block_table[request * table_row + i] = blocks[i];
    if (thread == 0) {
      seq_lens[request] = length;
      cu_seqlens_q[request + 1] = own.first + own.count;
    }
    if (own.sample >= 0) {
      if (thread == 0) sample_rows[own.sample] = own.first + own.count - 1;
      if (thread < kSettings) settings[own.sample * kSettings + thread] = own.settings[thread];
      if (thread < kKeys) keys[own.sample * kKeys + thread] = own.keys[thread];
    }
  } else if (request < requests && thread == 0) {
    seq_lens[request] = 0;
    cu_seqlens_q[request + 1] = used_tokens;
  }
  const int place = request * threads + thread, step = gridDim.x * threads;
  for (int t = used_tokens + place; t < tokens; t += step) {
    token_ids[t] = 0;
    positions[t] = 0;
    slot_mapping[t] = -1;
  }
  for (int s = used_samples + place; s < samples; s += step) {
    sample_rows[s] = 0;
    for (int i = 0; i < kSettings; ++i)  // temperature 0, top_p 1, no min_p, no penalty
      settings[s * kSettings + i] = i == 1 || i == 3 ? 1.0f : i == 2 ? kiln::minus_infinity() : 0.0f;
    for (int i = 0; i < kKeys; ++i) keys[s * kKeys + i] = i == 3 ? -1 : 0;
  }
}
