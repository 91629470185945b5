// The scheduler: starts and retires blocks; a seeded choice decides which thread runs next.
#include <sched.h>
#include <time.h>

#include <algorithm>

#include "runtime.h"

namespace cuda_host {

Run run;

uint64_t random_bits() {
  run.random ^= run.random << 13;
  run.random ^= run.random >> 7;
  return run.random ^= run.random << 17;
}

constexpr uint64_t kSecond = 1000000000, kMostSeconds = 600;

static uint64_t time_of(clockid_t id) {
  timespec t{};
  clock_gettime(id, &t);
  return uint64_t(t.tv_sec) * kSecond + uint64_t(t.tv_nsec);
}
static uint64_t real_time() { return time_of(CLOCK_MONOTONIC); }

// Waiting for another process takes no CPU time, so then the limit is one of real time.
static double seconds_now() {
  const clockid_t id = run.processes ? CLOCK_MONOTONIC : CLOCK_PROCESS_CPUTIME_ID;
  return double(time_of(id)) / kSecond;
}
bool too_long() { return seconds_now() > run.seconds; }

void wake(Fiber& fiber) {
  fiber.waiting = fiber.at_barrier = false;
  run.ready.push_back(&fiber);
  run.idle = 0;
}

void yield() {
  run.ready.push_back(current);
  back_to_scheduler();
}

void fiber_main() {
  Block& block = *current->block;
  block.launch->entry(block.launch->parameters);
  current->done = true;
  block.live--;
  run.idle = 0;
  lane_exited(*current);
  if (block.live && block.arrived == block.live) complete_barrier(block);
  if (!block.live) check_groups(block);
  thread_exited(*current);
  back_to_scheduler();
  __builtin_unreachable();  // a finished thread is never resumed
}

static unsigned gpu_of(const Block& block) { return block.launch->gpus ? block.index.y : 0; }

// Threads inherit the clock of the launch; no thread is ordered after their first epoch yet.
static void start_checking(Block& block, const Rank& rank) {
  const unsigned first = block.fibers[0].id;
  const auto from = rank.start->begin() + first;
  const auto clock = std::make_shared<const Clock>(
      Clock{first, {from, from + long(block.fibers.size())}, rank.start});
  for (Fiber& fiber : block.fibers) {
    run.owners[fiber.id] = {block.rank, gpu_of(block), block.number, fiber.index};
    fiber.clock = clock;
    fiber.epoch = clock->own[fiber.index] + 1;
  }
  const uintptr_t fixed = uintptr_t(block.launch->shared.begin);
  const uintptr_t dynamic = uintptr_t(block.dynamic.data());
  block.regions[0] = {fixed, fixed + block.shared.size(), nullptr};
  block.regions[1] = {dynamic, dynamic + block.dynamic.size(), nullptr};
}

// Start block n of the grid.
static void start_block(Rank& rank, Launch& launch, unsigned n,
                        const std::shared_ptr<Cluster>& cluster) {
  launch.started++;
  const dim3 grid = launch.grid, shape = launch.shape;
  const unsigned threads = shape.x * shape.y * shape.z;
  auto block = std::make_unique<Block>();
  block->launch = &launch;
  block->cluster = cluster;
  cluster->blocks.push_back(block.get());
  cluster->live += threads;
  block->rank = unsigned(&rank - run.ranks.data());
  block->number = n;
  block->index = {n % grid.x, n / grid.x % grid.y, n / grid.x / grid.y};
  block->shared.assign(launch.shared.size, kPoison);  // kernels cannot rely on zeros
  block->dynamic.assign(launch.dynamic_bytes, kPoison);
  block->waiting_lanes.assign((threads + 31) / 32, 0);
  block->live = threads;
  block->fibers = std::vector<Fiber>(threads);
  for (unsigned i = 0; i < threads; i++) {
    Fiber& fiber = block->fibers[i];
    fiber.block = block.get();
    fiber.thread = {i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
    fiber.index = i;
    fiber.id = rank.first + launch.first + n * threads + i;
    run.ready.push_back(&fiber);
  }
  if (run.check) start_checking(*block, rank);
  rank.resident.push_back(std::move(block));
}

// The rank's next launch is ordered after this block and after all that this block is ordered
// after.
static void remember(Rank& rank, const Block& block) {
  const Clock* last = nullptr;
  for (const Fiber& fiber : block.fibers) {
    if (fiber.clock.get() != last) {
      last = fiber.clock.get();
      raise(rank.after, last->first, last->own);
      if (last->others != rank.start) raise(rank.after, 0, *last->others);
    }
    rank.after[fiber.id] = fiber.epoch;
  }
}

// Remove finished blocks and launches; start new blocks.
static void advance(Rank& rank) {
  for (size_t i = rank.resident.size(); i-- > 0;) {
    Block& block = *rank.resident[i];
    if (block.cluster->live) continue;  // peers may still access its shared memory
    if (run.check) remember(rank, block);
    if (run.shared_owner == &block) run.shared_owner = nullptr;
    rank.resident.erase(rank.resident.begin() + long(i));
  }
  while (!rank.queue.empty()) {
    Launch& launch = rank.queue.front();
    const unsigned most = launch.together ? launch.blocks : run.resident;
    while (launch.started < launch.blocks && rank.resident.size() < most) {
      const auto cluster = std::make_shared<Cluster>();
      const unsigned size = launch.cluster, stride = launch.stride;
      const unsigned c = launch.started / size, first = c / stride * stride * size + c % stride;
      for (unsigned i = 0; i < size; i++) start_block(rank, launch, first + i * stride, cluster);
    }
    if (!rank.resident.empty()) return;
    const auto known = launch.informed ? rank.before : rank.start;
    rank.queue.pop_front();
    if (!run.check) continue;
    rank.before = std::make_shared<const Epochs>(rank.after);
    rank.start = !rank.queue.empty() && rank.queue.front().overlaps ? known : rank.before;
    rank.after = *rank.start;
  }
}

static bool is_victim(const Fiber& fiber) {
  const Victim& v = run.victim;
  return fiber.block->rank == v.rank && gpu_of(*fiber.block) == v.gpu &&
         (!v.block || fiber.block == v.block) && (v.warp == ~0u || fiber.index / 32 == v.warp);
}

static size_t random_below(size_t n) {
  return size_t((random_bits() >> 32) * n >> 32);
}

// Seed 0 runs threads in turn. Other seeds choose at random, and now and then freeze a GPU, a
// block or a warp for up to 16384 steps: a uniform choice almost never lets one GPU get far ahead.
static Fiber& pick() {
  const size_t n = run.ready.size();
  if (run.seed && run.idle < 4 * n) {  // if all poll, run them in turn: one may make progress
    size_t i = random_below(n);
    // Switching blocks copies their shared variables, so stay with one block for some steps.
    if (run.ranks.size() == 1 && run.shared_owner && random_below(16))
      for (int tries = 0; tries < 8 && run.ready[i]->block != run.shared_owner; tries++)
        i = random_below(n);
    if (run.switches >= run.victim.until && random_below(64) == 0) {
      const Fiber& f = *run.ready[i];
      const uint64_t kind = random_below(3);
      run.victim = {f.block->rank, gpu_of(*f.block), kind == 2 ? f.index / 32 : ~0u,
                    kind ? f.block : nullptr, run.switches + (16ull << random_below(11))};
    }
    if (run.switches < run.victim.until) {
      int tries = 0;
      while (is_victim(*run.ready[i]) && ++tries < 32) i = random_below(n);
      if (tries == 32 && run.ranks.size() == 1) run.victim.until = 0;  // no other thread can run
    }
    std::swap(run.ready.front(), run.ready[i]);
  }
  Fiber& fiber = *run.ready.front();
  run.ready.pop_front();
  return fiber;
}

uint64_t nanoseconds() {
  run.clock_read = true;
  return run.processes ? real_time() : run.clock;
}

// All threads wait. If one of them has a time limit, let time pass until it ends its wait.
static bool pass_time() {
  if (!run.clock_read || run.clock - run.clock_at_progress >= kMostSeconds * kSecond) return false;
  run.clock += kSecond;
  run.idle = 1;  // 0: there was progress
  return true;
}

// All threads wait, at least one for another process. The ranks share few cores, so let another
// process run: by sched_yield at first, then by sleeps that become longer, up to 10 milliseconds.
static void rest() {
  if (too_long()) return describe_stuck("time limit");
  const uint64_t now = real_time();
  if (!run.resting_since) run.resting_since = now;
  const uint64_t rested = now - run.resting_since;
  if (rested < 100000) {
    sched_yield();
  } else {
    const timespec t{0, long(std::min<uint64_t>(rested / 8, 10000000))};
    nanosleep(&t, nullptr);  // a signal may end it early, which does no harm
  }
  run.idle = 1;  // 0: there was progress
}

// All threads poll, and none has seen a change for long.
static void step_without_progress() {
  if (run.processes) {
    if (run.idle > 2 * run.ready.size()) rest();
  } else if (run.idle > 64 * run.ready.size() + 4096 && !pass_time()) {
    describe_stuck("deadlock: every thread waits, or polls a flag that nobody will set");
  }
}

static void step() {
  Fiber& fiber = pick();
  if (!(++run.switches & 0xffff) && too_long()) return describe_stuck("time limit");
  resume(fiber);
  if (run.stopped) return;
  if (fiber.done) {
    release_stack(fiber);
    if (!fiber.block->live) advance(run.ranks[fiber.block->rank]);
    return;
  }
  if (!run.idle) {
    run.clock_at_progress = run.clock;
    run.resting_since = 0;
  }
  if (!fiber.polled) return;
  run.idle++;
  step_without_progress();
}

void schedule() {
  const FaultGuard guard;
  run.seconds += seconds_now();
  for (Rank& rank : run.ranks) advance(rank);
  while (!run.stopped && !run.ready.empty()) step();
  for (Rank& rank : run.ranks) {
    if (!run.stopped && !rank.resident.empty()) describe_stuck("deadlock: nobody can go on");
    for (auto& block : rank.resident)
      for (Fiber& fiber : block->fibers) release_stack(fiber);
  }
}

}  // namespace cuda_host
