// The inputs of a step, from one message. For request r with tokens t = 0 .. count-1:
//   positions[first + t] = start + t + rotary_start
//   slot_mapping[first + t] = block * block_size + place
//   token_ids[first + t] = a token of the message, the token sampled last for r, or a draft
//   token_pool[slot_mapping[first + t]] = token_ids[first + t]
//
// message: see kiln/step/message.cuh.
// positions: rows of the rotary table, in which long requests may have a part of their own.
// tables: [rows, max_blocks], the KV blocks of every running request. First the new blocks of a
// record are appended to its row.
// block_table: [requests, max_blocks], for each request of the step a copy of its row of tables.
// sampled: [samples] int32, the tokens that the step before sampled.
// drafts: [rows, max_drafts] int32, the drafts behind the token that each row sampled last.
// rejected: [rows] int32, how many drafts each row rejected in the step before. Becomes 0.
// token_pool: [num_slots], the token in each slot of the KV pool.
// The outputs may be longer than the step, because a captured graph has fixed sizes. The rest of
// them is padding without effect: slot -1, length 0, greedy sampling of token 0's logits.
// No compile-time parameters.
//
// Work split: one block per request, padding included; all blocks share the padding of tokens and
// samples.
// Memory: only a request's own block accesses its row, with one block barrier between adding blocks
// and reading the row, and between reading `rejected` and clearing it.
// Callers: no two requests have the same row, or write the same slot; the outputs are large enough
// for the step.
#include "kiln/step/message.cuh"

using kiln::kKeys, kiln::kSettings;

extern "C" __global__ void __launch_bounds__(128)
step_inputs(int64_t* token_ids, int64_t* positions, int64_t* slot_mapping, int32_t* cu_seqlens_q,
            int32_t* seq_lens, int64_t* sample_rows, float* settings, int64_t* keys,
            int32_t* block_table, int32_t* tables, int32_t* token_pool, const int32_t* message,
            const int32_t* sampled, const int32_t* drafts, int32_t* rejected, int requests,
            int tokens, int samples, int64_t table_row, int64_t tables_row, int64_t drafts_row,
            int block_size) {
  kiln::pdl_writes_plan();
  const int thread = threadIdx.x, threads = blockDim.x, request = blockIdx.x;
  const int used = message[0], used_tokens = message[1], used_samples = message[2];
  if (request == 0 && thread == 0) cu_seqlens_q[0] = 0;
  if (request < used) {
    const kiln::Record& own = kiln::record_of(message, request);
    int32_t* blocks = tables + own.row * tables_row;
    const int unknown = own.num_given == 0 ? rejected[own.row] : 0;
    const int start = own.start - unknown;
    for (int i = thread; i < own.num_new; i += threads)
      blocks[own.num_blocks + i] = message[own.blocks_at + i];
    __syncthreads();
    if (thread == 0) rejected[own.row] = 0;
    for (int t = thread; t < own.count; t += threads) {
      const int position = start + t;
      const int token = t < own.num_given ? message[own.tokens_at + t]
                        : t == 0          ? sampled[own.source - unknown]
                                          : drafts[own.row * drafts_row + t - 1];
      token_ids[own.first + t] = token;
      positions[own.first + t] = position + own.rotary_start;
      const int64_t slot =
          int64_t(blocks[position / block_size]) * block_size + position % block_size;
      slot_mapping[own.first + t] = slot;
      token_pool[slot] = token;
    }
    const int length = start + own.count;
    for (int i = thread; i * block_size < length; i += threads)
      block_table[request * table_row + i] = blocks[i];
    if (thread == 0) {
      seq_lens[request] = length;
      cu_seqlens_q[request + 1] = own.first + own.count;
    }
    for (int i = thread; i < own.num_samples * kSettings; i += threads) {
      const int sample = own.sample + i / kSettings, column = i % kSettings;
      settings[sample * kSettings + column] = own.settings[column];
      if (column < kKeys)
        keys[sample * kKeys + column] =
            own.keys[column] + (column == 1 ? i / kSettings - unknown : 0);
      if (column == 0)
        sample_rows[sample] = own.first + own.count - own.num_samples + i / kSettings;
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
