// The message that describes a step: kHeader words (requests, tokens, samples, the place of the
// wanted drafts), a Record for each request, then the lists that records point into, and the wanted
// drafts of each request. [words] int32, aligned to 8 bytes.
#pragma once

#include "kiln/ptx/launch.cuh"

namespace kiln {

constexpr int kHeader = 4, kWanted = 3, kSettings = 6, kKeys = 4;

// One request's part of a step. The host may plan it before it knows how many drafts of the step
// before were accepted. It then assumes that all were, and num_given is 0: the device takes the last
// token itself, and subtracts the number of rejected drafts from start and from keys[1].
struct Record {
  int row;          // of tables
  int start;        // position of the first token
  int count;        // tokens of this step
  int first;        // index of the first token in the step
  int tokens_at;    // place of the given tokens in the message
  int num_given;    // so many tokens are in the message; if none, the first is the one sampled
                    // last. The others are drafts of the device
  int source;       // index of the request's last sample in the step before
  int blocks_at;    // place of the new blocks in the message
  int num_blocks;   // blocks that the table row has already
  int num_new;      // new blocks
  int sample;       // index of the first sample
  int num_samples;  // one token is sampled behind each of the last num_samples tokens
  int rotary_start;   // where the rotary table of this request begins, in rows; see rotary_table
  float settings[kSettings];
  int64_t keys[kKeys];  // keys[1]: how many tokens were sampled before the first sample
};

__device__ inline const Record& record_of(const int32_t* message, int request) {
  return reinterpret_cast<const Record*>(message + kHeader)[request];
}

// How many drafts a request wants behind this step. The place 0 says that no request wants any.
__device__ inline int wanted_drafts(const int32_t* message, int request) {
  return message[kWanted] ? message[message[kWanted] + request] : 0;
}

}  // namespace kiln
