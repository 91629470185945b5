// The checker: happens-before with scopes, bounds, and uninitialised shared memory. Kernels
// compiled with -fsanitize, but linked without its runtime, call the hooks at the end of this file.
#include <dlfcn.h>

#include <algorithm>

#include "runtime.h"

namespace cuda_host {

void raise(Epochs& to, unsigned at, const Epochs& from) {
  for (size_t i = 0; i < from.size(); i++) to[at + i] = std::max(to[at + i], from[i]);
}

void Clock::merge(const Clock& from) {
  if (from.others == others && from.first == first) return raise(own, 0, from.own);
  auto all = std::make_shared<Epochs>(*others);
  raise(*all, 0, *from.others);
  raise(*all, from.first, from.own);
  for (size_t i = 0; i < own.size(); i++) own[i] = std::max(own[i], (*all)[first + i]);
  others = std::move(all);
}

ClockRef release_clock(Fiber& fiber) {  // what an acquire is then ordered after
  Clock clock = *fiber.clock;
  clock.own[fiber.index] = fiber.epoch++;
  return std::make_shared<const Clock>(std::move(clock));
}

void learn(Fiber& fiber, const Clock& clock) {
  Clock merged = *fiber.clock;
  merged.merge(clock);
  fiber.clock = std::make_shared<const Clock>(std::move(merged));
}

// Order these threads of one block after each other, as a barrier does.
void order_all(const std::vector<Fiber*>& fibers) {
  Clock clock = *fibers[0]->clock;
  const Clock* last = fibers[0]->clock.get();
  for (const Fiber* f : fibers) {
    if (f->clock.get() != last) clock.merge(*(last = f->clock.get()));
    clock.own[f->index] = std::max(clock.own[f->index], f->epoch);
  }
  const auto shared = std::make_shared<const Clock>(std::move(clock));
  for (Fiber* f : fibers) {
    f->clock = shared;
    f->epoch++;
  }
}

bool covers(Scope scope, unsigned a, unsigned b) {
  const Owner &x = run.owners[a], &y = run.owners[b];
  const bool same_gpu = x.rank == y.rank && x.gpu == y.gpu;
  return scope == sys || (same_gpu && (scope == gpu || x.block == y.block));
}

static Region* find_region(uintptr_t& p, bool* shared, const void* pc) {
  Block* block = current->block;
  if (block->cluster->blocks.size() > 1) {
    if (Block* peer = find_peer(p)) block = peer;
    if (!block->live)
      fail(format("block %u has exited; its shared memory is reached by %s", block->number,
                  where(*current, pc).c_str()));
  }
  for (Region& r : block->regions)
    if ((*shared = p - r.begin < r.end - r.begin)) return &r;
  const auto after = std::upper_bound(run.regions.begin(), run.regions.end(), p,
                                      [](uintptr_t q, const Region& r) { return q < r.begin; });
  return after == run.regions.begin() || p >= after[-1].end ? nullptr : &after[-1];
}

// Return the shadow of an address, or null for memory that has none: a kernel's constants.
static Word* shadow(uintptr_t& p, size_t bytes, bool write, bool* shared, const void* pc) {
  Region* region = find_region(p, shared, pc);
  Dl_info info{};
  if (!region && !write && dladdr(reinterpret_cast<void*>(p), &info)) return nullptr;
  if (!region || p + bytes > region->end)
    fail(format("out-of-bounds %s of %zu bytes at 0x%zx by %s", write ? "write" : "read", bytes, p,
                where(*current, pc).c_str()));
  const uintptr_t first = region->begin >> 3;
  if (!region->words) {  // calloc: untouched pages cost nothing
    const size_t count = ((region->end - 1) >> 3) - first + 1;
    region->words.reset(static_cast<Word*>(calloc(count, sizeof(Word))));
    if (!region->words) abort();
  }
  return &region->words.get()[(p >> 3) - first];
}

static std::string describe(const Access& a) {
  const Owner& o = run.owners[a.id];
  return format("%s%s by rank %u block %u thread %u at %s", a.scope < 0 ? "" : "atomic ",
                a.write ? "write" : "read", o.rank, o.block, o.thread, at(a.place()).c_str());
}

// Compare an access with those recorded for its word, then record it.
static void visit(Word& word, const Access& a, bool shared) {
  Access* place = nullptr;
  for (Access& old : word.slots) {
    const bool repeats = old.id == a.id && old.mask == a.mask && old.write == a.write &&
                         old.scope == a.scope;
    if (!old.epoch || repeats) {
      if (!place || repeats) place = &old;
      continue;
    }
    if (!(old.mask & a.mask) || old.id == a.id || !(old.write || a.write)) continue;
    if (old.epoch <= (*current->clock)[old.id]) {
      // Any race with the old access is also a race with this one: drop the old.
      if (!(old.mask & ~a.mask) && (a.write || !old.write)) old.epoch = 0;
      continue;
    }
    const bool atomic = old.scope >= 0 && a.scope >= 0;
    if (atomic && !a.write) old.seen = true;
    if (!atomic || !covers(Scope(old.scope), old.id, a.id) || !covers(Scope(a.scope), a.id, old.id))
      report_once(std::min(a.place(), old.place()), std::max(a.place(), old.place()),
                  format("data race on %s memory: ", shared ? "shared" : "global") + describe(a) +
                      ", unordered with " + describe(old));
  }
  if (!place) place = &word.slots[run.accesses % 6];  // races with an evicted access can be missed
  *place = a;
}

// Whether an address is on the thread's own stack.
static bool is_own(uintptr_t p) { return p - uintptr_t(current->stack) < kStackBytes; }

bool check(const void* address, size_t bytes, Kind kind, int scope, const void* pc) {
  uintptr_t p = uintptr_t(address);
  const bool write = kind != Kind::read;
  bool shared = false;
  if (is_own(p)) return false;
  Word* word = shadow(p, bytes, write, &shared, pc);
  for (const uintptr_t end = p + bytes; word && p < end; word++) {
    const unsigned offset = p & 7, size = unsigned(std::min<uintptr_t>(8 - offset, end - p));
    const auto mask = uint8_t(((1u << size) - 1) << offset);
    if (shared && kind != Kind::write && (word->written & mask) != mask)
      report_once(pc, nullptr, "read of uninitialised shared memory by " + where(*current, pc));
    visit(*word, {current->id, current->epoch, uintptr_t(pc), mask, scope, write, 0}, shared);
    if (write) word->written |= mask;
    p += size;
  }
  return shared;
}

bool seen_by_wgmma(const void* address, size_t bytes) {
  uintptr_t p = uintptr_t(address);
  bool shared = false;
  const Word* word = shadow(p, bytes, false, &shared, nullptr);
  const auto& fibers = current->block->fibers;
  for (const uintptr_t end = p + bytes; word && p < end; p += 8, word++)
    for (const Access& a : word->slots)
      if (a.epoch && a.write && a.id - fibers[0].id < fibers.size() &&
          a.epoch > fibers[a.id - fibers[0].id].published)
        return false;
  return true;
}

// For shared memory that the current thread has just written, but that must not be read yet.
void mark_uninitialised(const void* address, size_t bytes) {
  uintptr_t p = uintptr_t(address);
  bool shared = false;
  Word* word = shadow(p, bytes, true, &shared, nullptr);
  for (uintptr_t q = p; q < p + bytes; q++)
    word[(q >> 3) - (p >> 3)].written &= uint8_t(~(1u << (q & 7)));
}

static void on_access(const void* p, size_t bytes, Kind kind, const void* pc) {
  if (!current || !run.check) return;
  if (!(++run.accesses & 0xffff) && too_long()) {
    describe_stuck("time limit: still running is " + where(*current, pc));
    back_to_scheduler();
  }
  check(p, bytes, kind, -1, pc);
}

static void undefined(const char* what, const void* pc) {
  fail(std::string(what) + " by " + where(*current, pc));
}

// For what a GPU does in one access: also check its alignment. That is free here, while a
// sanitizer's check of every dereferenced pointer took a fifth of the compile time.
static void on_whole_access(const void* p, size_t bytes, Kind kind, const void* pc) {
  if (uintptr_t(p) % bytes && current && run.check && !is_own(uintptr_t(p)))
    undefined("misaligned access", pc);
  on_access(p, bytes, kind, pc);
}

}  // namespace cuda_host

using namespace cuda_host;
#define API extern "C" CUDA_HOST_API
#define PC __builtin_return_address(0)
#define HOOKS(n)                                                                \
  API void __tsan_read##n(void* p) { on_whole_access(p, n, Kind::read, PC); }      \
  API void __tsan_write##n(void* p) { on_whole_access(p, n, Kind::write, PC); }    \
  API void __tsan_unaligned_read##n(void* p) { on_access(p, n, Kind::read, PC); }  \
  API void __tsan_unaligned_write##n(void* p) { on_access(p, n, Kind::write, PC); }
HOOKS(1) HOOKS(2) HOOKS(4) HOOKS(8) HOOKS(16)
API void __tsan_read_range(void* p, size_t n) { on_access(p, n, Kind::read, PC); }
API void __tsan_write_range(void* p, size_t n) { on_access(p, n, Kind::write, PC); }
API void __tsan_init() {}
API void __tsan_func_entry(void*) {}
API void __tsan_func_exit() {}
API void* __tsan_memset(void* to, int byte, size_t n) {  // clang replaces mem* calls by these
  on_access(to, n, Kind::write, PC);
  return __builtin_memset(to, byte, n);
}
API void* __tsan_memcpy(void* to, const void* from, size_t n) {
  on_access(from, n, Kind::read, PC);
  on_access(to, n, Kind::write, PC);
  return __builtin_memcpy(to, from, n);
}
API void __ubsan_handle_out_of_bounds(void*, void*) { undefined("out-of-bounds index", PC); }
API void __ubsan_handle_shift_out_of_bounds(void*, void*, void*) { undefined("bad shift", PC); }
API void __ubsan_handle_divrem_overflow(void*, void*, void*) { undefined("bad division", PC); }
