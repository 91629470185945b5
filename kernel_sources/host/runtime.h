// Shared by the runtime's files. Every CUDA thread is a fiber, and one OS thread runs all fibers.
// The seed decides their order, so a run can be repeated. A rank is a stream: its launches run in
// order, while launches of different ranks interleave freely.
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

// A vector clock: the epoch up to which a thread is ordered after each other thread. Epochs of the
// own block are kept separately, so a barrier costs a block's size, not the grid's.
using Epochs = std::vector<uint32_t>;
struct Clock {
  unsigned first = 0;  // id of the block's thread 0
  Epochs own;
  std::shared_ptr<const Epochs> others;  // of all ids; outdated for the own block
  uint32_t operator[](unsigned id) const {
    return id - first < own.size() ? own[id - first] : (*others)[id];
  }
  void merge(const Clock& from);
};
using ClockRef = std::shared_ptr<const Clock>;
struct Publication { ClockRef clock; unsigned id; Scope scope; };  // left by a release
using Publications = std::unordered_map<const void*, std::vector<Publication>>;

enum class Kind { read, write, update };
struct Access {  // epoch 0: empty; scope -1: not atomic; 16 bytes: many exist
  uint32_t id, epoch;
  uint64_t pc : 48, mask : 8;
  int64_t scope : 6;
  uint64_t write : 1, seen : 1;  // seen: an atomic read found the value
  const void* place() const { return reinterpret_cast<const void*>(pc); }
};
static_assert(sizeof(Access) == 16);
struct Word { Access slots[6]; uint8_t written; };  // shadow of 8 bytes; all zero: never accessed
struct Freed { void operator()(void* p) const { free(p); } };
struct Region { uintptr_t begin = 0, end = 0; std::unique_ptr<Word, Freed> words; };
struct Segment { char* begin; size_t size; };  // thread-local variables of a kernel library

struct Launch {
  void (*entry)(void**);
  void** parameters;
  dim3 grid, shape;
  size_t dynamic_bytes;
  Segment shared;
  unsigned blocks, cluster;  // in the grid, and in a cluster
  unsigned stride;           // between the block numbers of a cluster
  bool overlaps;             // may start before the launch ahead has ended
  bool together;             // all blocks run at the same time
  bool gpus;                 // each blockIdx.y stands for a GPU of its own
  unsigned first;            // id of its thread 0 in the rank
  unsigned started = 0;
  bool informed = false;  // a block waited for the launch ahead before it let the next launch start
};
struct Block;
struct Copy {
  char* to;
  const char* from;
  unsigned bytes, group;
  bool valid, landed;  // landed: already copied, though no thread may rely on it
  const void* pc;
};
// Registers that wgmmas use. `words`: the current value of a pending sum; else the contents at the
// last fence.
struct Registers { uint32_t* begin; std::vector<uint32_t> words; unsigned users; };
struct Multiplication {  // a pending wgmma
  WgmmaOperands of;
  uint32_t a[4];  // the operand from registers
  unsigned group;
  bool done;  // already added, though no thread may rely on it
  const void* pc;
};
enum class Met { no, arrived, passed };  // state at the cluster's barrier
struct Fiber {
  void* stack_pointer = nullptr;  // null before its first run
  char* stack = nullptr;
  Block* block = nullptr;
  uint3 thread{};
  unsigned index = 0, id = 0;  // index: in the block; id: in the clocks
  bool done = false, waiting = false, at_barrier = false, at_cluster = false;
  Met met = Met::no;
  const char* what = "";  // what it waits for; site: where
  Site site{"", 0};
  bool polled = false;  // its last operation was to load a flag
  const void* polled_at = nullptr;
  uint64_t polled_value = 0;
  const void* remembered = nullptr;  // an address it has loaded; see comes_back
  unsigned loads = 0, most_loads = 1;
  WarpOp op{};  // the pending warp operation
  unsigned mask = 0, votes = 0;
  int value = 0, bytes = 0;
  void* data = nullptr;  // on the fiber's own stack
  std::vector<Copy> copies;  // cp.async in flight
  unsigned group = 0;        // number of the group that is not committed yet
  std::vector<Multiplication> multiplications;
  std::vector<Registers> registers;
  unsigned wgmma_group = 0, wgmmas = 0;  // group: not committed yet; wgmmas: all so far
  bool fenced = false;  // since the last wgmma_wait
  uint32_t epoch = 1;  // from here on: used by the checked form only
  ClockRef clock, released, arrival;
  uint32_t published = 0;  // its writes to shared memory up to this epoch are visible to wgmma
  uint32_t arrival_epoch = 0;  // `arrival`: its clock on arrival at the cluster's barrier
  std::vector<Publication> seen;  // by loads without acquire; a later fence acquires them
};
struct Cluster { std::vector<Block*> blocks; unsigned live = 0, arrived = 0; };
struct Block {
  Launch* launch;
  std::shared_ptr<Cluster> cluster;
  unsigned rank, number;  // `number`: the linear index
  uint3 index;
  std::vector<Fiber> fibers;
  std::vector<char> shared, dynamic;    // `shared`: static variables while other blocks run
  Region regions[2];                    // static, dynamic
  Publications publications;            // in shared memory
  std::vector<unsigned> waiting_lanes;  // one mask per warp
  unsigned live, arrived = 0;
  int votes = 0, result = 0;
  bool lets_in = false;          // has let the next launch start
  ClockRef met;                  // clock of the cluster's last barrier
  ClockRef waited_from, waited;  // cached result of waiting for the launch ahead, by clock
};
struct Rank {
  std::deque<Launch> queue;  // the front launch runs
  std::vector<std::unique_ptr<Block>> resident;
  unsigned first = 0, threads = 0;       // ids of the rank in the clocks
  // What the running launch is ordered after: `before` once it has waited for the launch ahead.
  std::shared_ptr<const Epochs> before, start;
  Epochs after;  // merged clocks of its retired blocks
};
struct Owner { unsigned rank, gpu, block, thread; };  // gpu: in the launch, see Launch::gpus
struct Victim { unsigned rank, gpu, warp; const Block* block; uint64_t until; };
struct Run {  // state of one run; each run starts from a new one
  uint64_t seed = 0, random = 1;
  unsigned resident = 1;  // blocks of a rank that run at a time
  bool check = false, stopped = false;
  bool processes = false;  // it waits for ranks in other processes: see rest
  double seconds = 0;      // limit of CPU time, or of real time; a longer run counts as a hang
  uint64_t idle = 0, switches = 0, accesses = 0;
  uint64_t clock = 0, clock_at_progress = 0;  // virtual, in ns
  bool clock_read = false;  // so a wait may have a time limit
  uint64_t resting_since = 0;  // real time in ns; 0: some thread has made progress
  std::vector<Rank> ranks;
  std::vector<Owner> owners;  // by id in the clocks; checked form only
  std::deque<Fiber*> ready;
  Block* shared_owner = nullptr;  // block whose variables are in the thread-local segment
  Victim victim{};                // frozen by the seed
  std::vector<Region> regions;    // memory that kernels may access
  Publications publications;      // in global memory
  std::vector<std::string> reports;
  std::set<std::pair<const void*, const void*>> reported;
};
extern Run run;
constexpr char kPoison = '\xff';  // NaN in every type
extern Fiber* current;  // null while the scheduler runs
constexpr size_t kStackBytes = 256 << 10;

// fiber.cpp
void resume(Fiber& fiber);
void back_to_scheduler();
void release_stack(Fiber& fiber);
struct FaultGuard { FaultGuard(); ~FaultGuard(); };  // faults become reports while it exists
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
void check_groups(const Block& block);  // when the block ends
// check.cpp
void raise(Epochs& to, unsigned at, const Epochs& from);
void learn(Fiber& fiber, const Clock& clock);
ClockRef release_clock(Fiber& fiber);
void order_all(const std::vector<Fiber*>& fibers);
bool covers(Scope scope, unsigned a, unsigned b);
// Check an access; return whether it was to the block's shared memory.
bool check(const void* address, size_t bytes, Kind kind, int scope, const void* pc);
bool seen_by_wgmma(const void* address, size_t bytes);  // for what the block wrote there
void mark_uninitialised(const void* address, size_t bytes);
// api.cpp
std::string format(const char* text, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void fail(const std::string& report);
void report_once(const void* a, const void* b, const std::string& report);
std::string where(const Fiber& fiber, const void* pc = nullptr);  // thread and source line
std::string at(const void* pc);
void describe_stuck(const std::string& why);

}  // namespace cuda_host
