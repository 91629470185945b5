// Areas of the algorithms that pull: ranks read what others have written before a barrier. Block b
// of a rank reads only what block b of the other ranks, or its own rank, has written, so a barrier
// is one of blocks with the same index.
//
// A buffer has two areas, one for each phase, and a flag for each block and rank. The accesses to
// areas are ordered by the flags: what a thread of block b writes before a barrier is visible to
// all threads of block b of all ranks after it. Barriers are counted, two for each call; a flag
// holds the latest one that its rank has reached in any call, which may be ahead of the reader's.
//
//   call e of kind pull   first barrier 2 e + 1   second barrier 2 e + 2
#pragma once
#include "all_reduce/group.cuh"
#include "all_reduce/sum.cuh"

namespace kiln {

template <class T, int kMost> struct Areas {
  static constexpr int kBatch = 8 / kMost;  // vectors of a message that a thread has in flight

  const Group& group;
  const Call& call;
  Watchdog& watchdog;
  int64_t area_at;
  uint32_t *tells, *waits_for;  // flags of the first threads, one for each rank

  KILN_FN Areas(const Group& group, const Call& call, Watchdog& watchdog, int64_t flags_at,
                int64_t pull_at, int64_t area_bytes)
      : group(group), call(call), watchdog(watchdog),
        area_at(pull_at + int64_t(call.epoch % 2) * area_bytes), tells(nullptr), waits_for(nullptr) {
    const int64_t at = flags_at + 128 * blockIdx.x;
    const int peer = int(threadIdx.x);
    if (peer >= group.world || peer == group.rank) return;
    tells = reinterpret_cast<uint32_t*>(group.buffer(peer) + at) + group.rank;
    waits_for = group.own_word(at) + peer;
  }

  KILN_FN uint8_t* area(int of) const { return group.buffer(of) + area_at; }
  KILN_FN uint8_t* own_area() const { return group.own + area_at; }
  KILN_FN bool is_other(int rank) const {
    return has_rank<kMost>(rank, group.world) && rank != group.rank;
  }

  // Wait for block blockIdx.x of all ranks; number: 1 or 2. Returns whether they have come in time.
  KILN_FN bool barrier(uint32_t number) const {
    const uint32_t goal = 2 * call.epoch + number;
    bool late = !call.live;
    __syncthreads();  // all threads of the block have written
    if (!late && tells) {
      store_release<Scope::sys>(tells, goal);
      for (Wait wait; !late && int(load_acquire<Scope::sys>(waits_for) - goal) < 0;)
        late = wait.is_over(group, watchdog, int(threadIdx.x));
    }
    return !__syncthreads_or(late);
  }
};

}  // namespace kiln
