// A group of ranks as a kernel sees it, the counters of its calls, and the limit on waiting.
//
// A rank's buffer (jit_kernels/ops/all_reduce/layout.py): word 0 is the poison, which any rank may
// set; word 1 is the claim on the record; then follow the counters, two words for each block.
//
// A call is number e of its kind, push or pull, counted by each block in device memory, so that a
// CUDA graph can repeat it. It uses phase e % 2 of the slots or areas. Why two phases are enough,
// for ranks A and B, where B reads A's data and then makes the place free again:
//
//   A, call e      A writes to phase e % 2 of B's buffer
//   B, call e      B reads it, and makes the place free
//   B, call e + 1  begins when B's call e has ended: one stream, and kernels wait for those ahead
//   A, call e + 1  cannot end without data or a flag from every rank that has begun call e + 1
//   A, call e + 2  so A writes to phase e % 2 again only after B has made the place free
//
// It holds for counters that wrap around, as 2^32 is even. It does not hold for two calls at the
// same time, so all calls of a group are in one stream, in the same order on every rank.
#pragma once
#include "kiln/ptx/clock.cuh"
#include "kiln/ptx/memory.cuh"

namespace kiln {

enum class Kind { push, pull };
enum class Algorithm { one_shot_push, two_shot_push, one_shot_pull, two_shot, fused };

// Words of a record. kPoisoned: the poison that a call has found. kStop: the host sets it when a
// rank is gone, which ends all waits.
constexpr int kPoisoned = 10, kStop = 11;

struct Group {
  uint8_t *buffers, *own;  // of the first rank of the launch, and of this rank
  const int64_t* peers;    // distance from `buffers` to each rank's buffer
  uint32_t* records;       // of the launch's ranks
  int rank, world;

  KILN_FN Group(uint8_t* buffers, int64_t buffer_bytes, const int64_t* peers, uint32_t* records,
                int first_rank, int world)
      : buffers(buffers), own(buffers + blockIdx.y * buffer_bytes), peers(peers),
        records(records), rank(first_rank + int(blockIdx.y)), world(world) {}

  // A function and not a member, because a member would hold a register all the time.
  KILN_FN uint32_t* record() const { return records + 16 * blockIdx.y; }
  KILN_FN uint8_t* buffer(int of) const { return buffers + peers[of]; }
  KILN_FN uint32_t* own_word(int64_t at) const { return reinterpret_cast<uint32_t*>(own + at); }
};

// Limits how long a thread waits for other ranks. After a timeout its later waits return at once.
struct Watchdog {
  uint32_t limit_ms;
  int missing = -1;  // the rank that did not come in time
  uint32_t waited_ms = 0;

  KILN_FN explicit Watchdog(int limit_ms) : limit_ms(uint32_t(limit_ms)) {}
  KILN_FN bool is_late() const { return missing >= 0; }
};
constexpr uint32_t kPollsPerStop = 64 * kPollsPerClock;  // the record may be in the host's memory
struct Wait {
  uint32_t polls = 0;
  uint64_t since = 0;

  // Call it after each unsuccessful poll; returns whether to give up.
  KILN_FN bool is_over(const Group& group, Watchdog& watchdog, int missing) {
    if (++polls % kPollsPerClock) return false;
    const uint64_t now = nanoseconds();
    if (!since) since = now | 1;
    if (now < since || now - since < uint64_t(watchdog.limit_ms) * 1000000)
      if (polls % kPollsPerStop || !load_relaxed<Scope::sys>(group.record() + kStop)) return false;
    watchdog.missing = missing;
    watchdog.waited_ms = uint32_t((now - since) / 1000000);
    return true;
  }
};

// A block's part in one call.
struct Call {
  static constexpr int64_t kCounters = 128;  // their offset in a buffer

  uint32_t* counter;
  uint32_t epoch;
  bool live;  // false: some rank was late in an earlier call, so nobody waits any more

  KILN_FN Call(const Group& group, Kind kind)
      : counter(group.own_word(kCounters + 8 * blockIdx.x) + int(kind)),
        epoch(load_relaxed(counter)),
        live(load_relaxed<Scope::sys>(group.own_word(0)) == 0) {}

  // Last statement of a kernel, for all threads of the block.
  KILN_FN void end(const Group& group, const Watchdog& watchdog, Algorithm algorithm,
                   int64_t num_bytes) {
    if (watchdog.is_late()) report(group, watchdog, algorithm, num_bytes);
    if (!live && threadIdx.x == 0) report_poison(group);
    __syncthreads();  // all have read the counter
    if (threadIdx.x == 0) store_relaxed(counter, epoch + 1);
  }

 private:
  // The first thread of a rank that is late writes the record. The poison then lets the calls that
  // follow end at once, on all ranks.
  KILN_FN void report(const Group& group, const Watchdog& watchdog, Algorithm algorithm,
                      int64_t num_bytes) const {
    if (atomicCAS(group.own_word(4), 0u, 1u) != 0) return;
    const uint32_t* counters = group.own_word(kCounters + 8 * blockIdx.x);
    const uint32_t calls = load_relaxed(counters) + load_relaxed(counters + 1);
    auto write = [&](int field, uint32_t x) { store_relaxed<Scope::sys>(group.record() + field, x); };
    write(1, uint32_t(group.rank));
    write(2, uint32_t(watchdog.missing));
    write(3, uint32_t(group.world));
    write(4, uint32_t(num_bytes));
    write(5, uint32_t(num_bytes >> 32));
    write(6, calls + 1);
    write(7, epoch);
    write(8, blockIdx.x);
    write(9, watchdog.waited_ms);
    store_release<Scope::sys>(group.record(), uint32_t(algorithm) + 1);
    const uint32_t poison = 1 | uint32_t(group.rank) << 8 | uint32_t(watchdog.missing) << 16;
#pragma unroll 1
    for (int rank = 0; rank < group.world; ++rank)
      store_relaxed<Scope::sys>(reinterpret_cast<uint32_t*>(group.buffer(rank)), poison);
  }
  KILN_FN static void report_poison(const Group& group) {
    store_relaxed<Scope::sys>(group.record() + kPoisoned,
                              load_relaxed<Scope::sys>(group.own_word(0)));
  }
};

}  // namespace kiln
