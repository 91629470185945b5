// Clears in mask[r] the last token of each word of row r, if the other tokens of the word are the
// last tokens of the row's request.
//
// mask: [rows, ceil(vocab / 32)], one bit per token, lowest bit first; 1 allows the token. words:
// [num_words] Word. lengths: [rows] int64, how many tokens the request of each row has. word_tokens:
// the tokens of all words, one after the other. token_pool: [num_slots], the token in each slot of
// the KV pool. tables: [max_requests, max_blocks], the KV blocks of each request. No compile-time
// parameters.
//
// Work split: one thread per word. Several words may ban tokens of one element of the mask, so it
// is changed atomically.
#include "kiln/ptx/launch.cuh"

namespace {

struct Word {
  int mask_row;
  int row;     // of tables
  int first;   // of word_tokens
  int size;    // tokens of the word, at least 1
};

}  // namespace

extern "C" __global__ void __launch_bounds__(128)
ban_words(uint32_t* mask, const int32_t* words, const int64_t* lengths,
          const int32_t* word_tokens, const int32_t* token_pool, const int32_t* tables,
          int num_words, int mask_words, int64_t tables_row, int block_size) {
  kiln::pdl_wait_then_trigger();
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= num_words) return;
  const Word word = reinterpret_cast<const Word*>(words)[index];
  const int32_t* blocks = tables + word.row * tables_row;
  const int begin = int(lengths[word.mask_row]) - (word.size - 1);
  if (begin < 0) return;
  for (int i = 0; i < word.size - 1; ++i) {
    const int position = begin + i;
    const int64_t slot =
        int64_t(blocks[position / block_size]) * block_size + position % block_size;
    if (token_pool[slot] != word_tokens[word.first + i]) return;
  }
  const int token = word_tokens[word.first + word.size - 1];
  uint32_t* element = mask + int64_t(word.mask_row) * mask_words + token / 32;
  atomicAnd(element, ~(1u << token % 32));
}
