// Slots of the algorithms that push: ranks write to each other's slots, and the data itself tells
// whether it has arrived. A word is kUnsent until its sender has written it; the reader waits for
// every word of a vector and then makes them kUnsent again. All accesses are relaxed at system
// scope, word by word; no order between words is needed.
//
// A buffer has slots for each phase and sender: [2, world, slot_bytes]; see group.cuh for phases.
#pragma once
#include "all_reduce/group.cuh"
#include "all_reduce/sum.cuh"

namespace kiln {

template <class T, int kMost> struct Slots {
  static constexpr int kBatch = 8 / kMost;  // vectors of a message that a thread has in flight
  static constexpr int kAll = kBatch * kMost;

  const Group& group;
  Watchdog& watchdog;
  int64_t phase_at, slot_bytes;
  uint8_t* inbox;
  bool live;

  KILN_FN Slots(const Group& group, const Call& call, Watchdog& watchdog, int64_t push_at,
                int64_t slot_bytes)
      : group(group), watchdog(watchdog),
        phase_at(push_at + int64_t(call.epoch % 2) * group.world * slot_bytes),
        slot_bytes(slot_bytes), inbox(group.own + phase_at), live(call.live) {}

  // Where this rank writes to, in each rank's buffer.
  struct Outboxes { uint8_t* of[kMost]; };
  KILN_FN Outboxes outboxes() const {
    Outboxes result;
#pragma unroll
    for (int to = 0; to < kMost; ++to)
      if (has_rank<kMost>(to, group.world))
        result.of[to] = group.buffer(to) + phase_at + group.rank * slot_bytes;
    return result;
  }
  KILN_FN static void send(uint8_t* outbox, int vector, const Chunk<T>& v) {
    store_words_relaxed<Scope::sys>(outbox + 16 * int64_t(vector), v.word);
  }
  // Whether a place is that of another rank.
  KILN_FN bool is_other(int rank) const {
    return has_rank<kMost>(rank, group.world) && rank != group.rank;
  }

  // Put this rank's own vector into its place of v [kMost]; return the places of the others.
  KILN_FN uint32_t with_own(uint32_t (*v)[4], const Chunk<T>& own) const {
    uint32_t others = 0;
#pragma unroll
    for (int rank = 0; rank < kMost; ++rank) {
      if (is_other(rank)) others |= 1u << rank;
      if (rank == group.rank)
#pragma unroll
        for (int k = 0; k < 4; ++k) v[rank][k] = own.word[k];
    }
    return others;
  }

  // Wait for vectors from other ranks and take them out. Bit b * kMost + s of `wanted` asks for
  // vector first + b * step from rank from + s, which replaces v[b * kMost + s]. Returns whether all
  // have come.
  template <int N>
  KILN_FN bool receive(uint32_t (&v)[N][4], uint32_t wanted, int first, int step,
                       int from = 0) const {
    if (!live || watchdog.is_late()) return false;
    uint32_t missing = wanted;
    for (Wait wait;;) {
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (missing >> i & 1) load_words_relaxed<Scope::sys>(v[i], place(i, first, step, from));
      uint32_t left = 0;
#pragma unroll
      for (int i = 0; i < N; ++i)
        if ((missing >> i & 1) && !is_sent(v[i])) left |= 1u << i;
      missing = left;
      if (!missing) break;
      if (wait.is_over(group, watchdog, from + (__ffs(int(missing)) - 1) % kMost)) return false;
    }
    const uint32_t unsent[4] = {kUnsent, kUnsent, kUnsent, kUnsent};
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (wanted >> i & 1) store_words_relaxed<Scope::sys>(place(i, first, step, from), unsent);
    return true;
  }

  // Receive one vector from all other ranks and add them up with this rank's own; arbitrary bits if
  // a rank is late. It takes two ranks at a time, for kernels that have few registers left; for the
  // same reason `own` is in shared memory.
  KILN_FN Chunk<T> receive_sum(const Chunk<T>* own, int vector) const {
    constexpr int kSome = 2;
    float sum[4][Word<T>::kSize];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int k = 0; k < Word<T>::kSize; ++k) sum[i][k] = -0.0f;  // -0 + x is x, for every x
#pragma unroll 1
    for (int begin = 0; begin < group.world; begin += kSome) {
      uint32_t v[kSome][4], wanted = 0;
#pragma unroll
      for (int s = 0; s < kSome; ++s)
        if (begin + s < group.world && begin + s != group.rank) wanted |= 1u << s;
      receive(v, wanted, vector, 0, begin);
#pragma unroll
      for (int s = 0; s < kSome; ++s) {
        if (begin + s == group.rank) add_to<T>(sum, load_vector<Chunk<T>>(own).word);
        else if (begin + s < group.world) add_to<T>(sum, v[s]);
      }
    }
    return rounded<T>(sum);
  }

 private:
  KILN_FN uint8_t* place(int i, int first, int step, int from) const {
    return inbox + (from + i % kMost) * slot_bytes + 16 * int64_t(first + i / kMost * step);
  }
};

}  // namespace kiln
