// How many drafts each request of a step rejects. A draft is accepted if it is the token that was
// sampled at the position before it, and all drafts before it are accepted:
//   rejected[row] = num_samples - 1 - (the first i with sampled[sample + i] != draft i)
// The drafts of a request are the last num_samples - 1 tokens of the step. A request with one
// sample has none, and its element stays as it is.
//
// message: see kiln/step/message.cuh. token_ids: [tokens] int64, of the step. sampled: [samples]
// int32, what this step has sampled. rejected: [rows] int32. No compile-time parameters.
//
// Work split: one thread per request of the step.
#include "kiln/step/message.cuh"

extern "C" __global__ void __launch_bounds__(128)
verify_chain(int32_t* rejected, const int32_t* message, const int64_t* token_ids,
             const int32_t* sampled, int requests) {
  kiln::pdl_wait_then_trigger();
  const int request = blockIdx.x * blockDim.x + threadIdx.x;
  if (request >= requests || request >= message[0]) return;
  const kiln::Record& own = kiln::record_of(message, request);
  const int drafts = own.num_samples - 1;
  if (drafts < 1) return;
  const int64_t* draft = token_ids + own.first + own.count - drafts;
  int accepted = 0;
  while (accepted < drafts && sampled[own.sample + accepted] == draft[accepted]) ++accepted;
  rejected[own.row] = drafts - accepted;
}
