// What the runtime's files share. Every CUDA thread is a fiber; one OS thread runs them all, in an
// order that the seed decides, so that a run can be repeated. Ranks are stream queues: the launches
// of one rank run in order, those of different ranks interleave freely.
#pragma once
#include <stdlib.h>

#include <deque>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#define CUDA_HOST_RUNTIME
#include "cuda_host.h"

namespace cuda_host {

// What a thread is ordered after: of every thread id, the epochs up to this one. The threads of the
// own block stand apart: barriers change only those, and so cost a block's size and not a grid's.
using Epochs = std::vector<uint32_t>;
struct Clock {
  unsigned first = 0;  // id of the block's thread 0
  Epochs own;
  std::shared_ptr<const Epochs> others;  // every id; stale for the own block
  uint32_t operator[](unsigned id) const {
    return id - first < own.size() ? own[id - first] : (*others)[id];
  }
  void merge(const Clock& from);
};
using ClockRef = std::shared_ptr<const Clock>;
struct Publication { ClockRef clock; unsigned id; Scope scope; };  // what a release left behind
using Publications = std::unordered_map<const void*, std::vector<Publication>>;

enum class Kind { read, write, update };
struct Access {  // epoch 0: an empty slot; scope -1: not atomic; 16 bytes, for there are many
  uint32_t id, epoch;
  uint64_t pc : 48, mask : 8;
  int64_t scope : 6;
  uint64_t write : 1, seen : 1;  // seen: what was written, by an atomic read
  const void* place() const { return reinterpret_cast<const void*>(pc); }
};
static_assert(sizeof(Access) == 16);
struct Word { Access slots[6]; uint8_t written; };  // shadow of 8 bytes; all zero: never touched
struct Freed { void operator()(void* p) const { free(p); } };
struct Region { uintptr_t begin = 0, end = 0; std::unique_ptr<Word, Freed> words; };
struct Segment { char* begin; size_t size; };  // a kernel library's thread-local variables

struct Launch {
  void (*entry)(void**);
  void** parameters;
  dim3 grid, shape;
  size_t dynamic_bytes;
  Segment shared;
  unsigned blocks, cluster;  // blocks of the grid, and of a cluster
  unsigned stride;           // from a block's number to that of the next of its cluster
  bool overlaps;             // it may start before the launch ahead has ended
  unsigned first;            // id of its thread 0 within the rank
  unsigned started = 0;
  bool informed = false;  // a block waited for the launch ahead before it let the next one in
};
struct Block;
struct Copy {
  char* to;
  const char* from;
  unsigned bytes, group;
  bool valid, landed;  // landed: the bytes are there already, but nobody may count on it
  const void* pc;
};
// Registers that a wgmma takes. `words`: of a sum under way what it is so far, else what the
// registers held at the last fence.
struct Registers { uint32_t* begin; std::vector<uint32_t> words; unsigned users; };
struct Multiplication {  // a wgmma under way
  WgmmaOperands of;
  uint32_t a[4];  // what it took from registers
  unsigned group;
  bool done;  // the sum has it already, but nobody may count on it
  const void* pc;
};
enum class Met { no, arrived, passed };  // at the cluster's barrier
struct Fiber {
  void* stack_pointer = nullptr;  // null until it first runs
  char* stack = nullptr;
  Block* block = nullptr;
  uint3 thread{};
  unsigned index = 0, id = 0;  // within the block; within the clocks
  bool done = false, waiting = false, at_barrier = false, at_cluster = false;
  Met met = Met::no;
  const char* what = "";  // what it waits for, and where
  Site site{"", 0};
  bool polled = false;  // its last act was to load a flag
  const void* polled_at = nullptr;
  uint64_t polled_value = 0;
  WarpOp op{};  // how it wants to meet other lanes
  unsigned mask = 0, votes = 0;
  int value = 0, bytes = 0;
  void* data = nullptr;  // on its own stack
  std::vector<Copy> copies;  // cp.async under way
  unsigned group = 0;        // of the copies that it has not committed yet
  std::vector<Multiplication> multiplications;
  std::vector<Registers> registers;
  unsigned wgmma_group = 0, wgmmas = 0;  // of those not committed yet; all so far
  bool fenced = false;  // since its last wgmma_wait
  uint32_t epoch = 1;  // from here on, the checked form only
  ClockRef clock, released, arrival;
  uint32_t published = 0;  // its writes to shared memory up to this epoch are seen by wgmma
  uint32_t arrival_epoch = 0;  // `arrival`: its clock when it arrived at the cluster's barrier
  std::vector<Publication> seen;  // by loads without acquire; a later fence acquires them
};
struct Cluster { std::vector<Block*> blocks; unsigned live = 0, arrived = 0; };
struct Block {
  Launch* launch;
  std::shared_ptr<Cluster> cluster;
  unsigned rank, number;  // `number`: the index as one number
  uint3 index;
  std::vector<Fiber> fibers;
  std::vector<char> shared, dynamic;    // `shared`: its static variables while others run
  Region regions[2];                    // static and dynamic
  Publications publications;            // in shared memory
  std::vector<unsigned> waiting_lanes;  // by warp
  unsigned live, arrived = 0;
  int votes = 0, result = 0;
  bool lets_in = false;          // the launch after this one
  ClockRef met;                  // what the cluster's last barrier taught
  ClockRef waited_from, waited;  // what waiting for the launch ahead makes of a clock
};
struct Rank {
  std::deque<Launch> queue;  // the front one runs
  std::vector<std::unique_ptr<Block>> resident;
  unsigned first = 0, threads = 0;       // its ids in the clocks
  // What the running launch is ordered after: once it has waited for the launch ahead, and before.
  std::shared_ptr<const Epochs> before, start;
  Epochs after;  // what every retired block of it did or knew
};
struct Owner { unsigned rank, block, thread; };
struct Victim { unsigned rank, warp; const Block* block; uint64_t until; };
struct Run {  // everything that belongs to one run; beginning a run replaces it
  uint64_t seed = 0, random = 1;
  unsigned resident = 1;  // blocks of a rank that run at the same time
  bool check = false, stopped = false;
  double seconds = 0;  // of processor time, before a run counts as hanging
  uint64_t idle = 0, switches = 0, accesses = 0;
  std::vector<Rank> ranks;
  std::vector<Owner> owners;  // by id in the clocks; checked form only
  std::deque<Fiber*> ready;
  Block* shared_owner = nullptr;  // whose variables the thread-local segment holds
  Victim victim{};                // whom the seed has frozen
  std::vector<Region> regions;    // memory that kernels may touch
  Publications publications;      // in global memory
  std::vector<std::string> reports;
  std::set<std::pair<const void*, const void*>> reported;
};
extern Run run;
constexpr char kPoison = '\xff';  // a NaN of every type
extern Fiber* current;  // null while the scheduler runs
constexpr size_t kStackBytes = 256 << 10;

// fiber.cpp
void resume(Fiber& fiber);
void back_to_scheduler();
void release_stack(Fiber& fiber);
struct FaultGuard { FaultGuard(); ~FaultGuard(); };  // memory faults become reports meanwhile
// scheduler.cpp
uint64_t random_bits();
bool too_long();
void schedule();
void fiber_main();
void wake(Fiber& fiber);
void yield();
// sync.cpp
void complete_barrier(Block& block);
void lane_exited(const Fiber& fiber);
// cluster.cpp
void thread_exited(Fiber& fiber);
Block* find_peer(uintptr_t& p);
// matrix.cpp
void check_row(const void* pc);     // of the current thread's ldmatrix
float widen(uint16_t x, bool bf16);
void matrix_operation(WarpOp op, Fiber* lanes);
// wgmma.cpp
void multiply_for_group(WarpOp op, Fiber* lanes);
void check_groups(const Block& block);  // at its end
// check.cpp
void raise(Epochs& to, unsigned at, const Epochs& from);
void learn(Fiber& fiber, const Clock& clock);
ClockRef release_clock(Fiber& fiber);
void order_all(const std::vector<Fiber*>& fibers);
bool covers(Scope scope, unsigned a, unsigned b);
// Check one access; return whether it was to the block's shared memory.
bool check(const void* address, size_t bytes, Kind kind, int scope, const void* pc);
bool seen_by_wgmma(const void* address, size_t bytes);  // what the block wrote there
void mark_uninitialised(const void* address, size_t bytes);
// api.cpp
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail(const std::string& report);
void report_once(const void* a, const void* b, const std::string& report);
std::string where(const Fiber& fiber, const void* pc = nullptr);  // thread and source line
std::string at(const void* pc);
void describe_stuck(const std::string& why);

}  // namespace cuda_host
