// Synchronisation of threads: barriers, warp operations, atomics and fences.
#include <string.h>

#include <algorithm>
#include <type_traits>

#include "runtime.h"

namespace cuda_host {

static bool same(Site a, Site b) { return a.line == b.line && !strcmp(a.file, b.file); }

static std::string describe(const Fiber& f) { return std::string(f.what) + " by " + where(f); }

// All lanes of `mask` have arrived: check that they request the same operation, then perform it.
static void complete_warp(Block& block, Fiber* lanes, unsigned mask) {
  std::vector<Fiber*> in;
  unsigned votes = 0;
  char data[32][16];  // of shuffles
  for (unsigned i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    Fiber& f = lanes[i];
    const bool same_call = f.op == warp_sync || same(f.site, current->site);
    if (f.mask != mask || f.op != current->op || !same_call)
      fail(format("warp divergence: %s (mask 0x%08x) meets %s (mask 0x%08x)",
                  describe(*current).c_str(), mask, describe(f).c_str(), f.mask));
    in.push_back(&f);
    votes |= unsigned(f.value & 1) << i;
    if (f.op == warp_shuffle) memcpy(data[i], f.data, size_t(f.bytes));
  }
  if (current->op > warp_ballot) matrix_operation(current->op, lanes);
  for (Fiber* f : in) {
    f->votes = votes;
    if (f->op != warp_shuffle) continue;
    const unsigned source = unsigned(f->value) & 31;
    if (!(mask >> source & 1))
      fail(format("%s reads lane %u, not in its mask 0x%08x", describe(*f).c_str(), source, mask));
    memcpy(f->data, data[source], size_t(f->bytes));
  }
  // Only __syncwarp orders memory; shuffles and votes do not.
  if (current->op == warp_sync && run.check) order_all(in);
  block.waiting_lanes[current->index / 32] &= ~mask;
  // A vote on values that its lanes polled is no progress, and neither is their wake-up.
  const auto polled = [](const Fiber* f) { return f->polled; };
  const uint64_t idle = std::any_of(in.begin(), in.end(), polled) ? run.idle : 0;
  for (Fiber* f : in)
    if (f != current) wake(*f);
  run.idle = idle;
}

unsigned warp(WarpOp op, unsigned mask, int value, void* data, int bytes, Site site) {
  static const char* const names[] = {"__syncwarp", "a shuffle", "a vote", "ldmatrix",
                                      "ldmatrix.trans", "mma", "mma", "wgmma", "wgmma_wait"};
  Fiber& f = *current;
  Block& block = *f.block;
  const unsigned warp_index = f.index / 32, lane = f.index % 32;
  const unsigned left = unsigned(block.fibers.size()) - warp_index * 32;
  Fiber* lanes = &block.fibers[warp_index * 32];
  f.polled &= op == warp_ballot;
  f.what = names[op];
  f.site = site;
  f.op = op;
  f.value = value;
  if (!(mask >> lane & 1))
    fail(format("the mask 0x%08x lacks its own caller: %s", mask, describe(f).c_str()));
  if (left < 32 && op > warp_ballot)
    fail(format("%s needs a whole warp", describe(f).c_str()));
  if (left < 32) mask &= (1u << left) - 1;  // allow a full mask in a partial last warp
  for (unsigned i = 0; i < 32; i++)
    if (mask >> i & 1 && lanes[i].done)
      fail(format("%s waits for lane %u, which has exited", describe(f).c_str(), i));
  f.mask = mask;
  f.data = data;
  f.bytes = bytes;
  if (op == warp_ldmatrix || op == warp_ldmatrix_trans) check_row(__builtin_return_address(0));
  unsigned& waiting = block.waiting_lanes[warp_index];
  waiting |= 1u << lane;
  if ((waiting & mask) == mask) {
    complete_warp(block, lanes, mask);
  } else {
    f.waiting = true;
    back_to_scheduler();
  }
  return f.votes;
}

void lane_exited(const Fiber& fiber) {
  const unsigned lane = fiber.index % 32, first = fiber.index - lane;
  for (unsigned i = first; i < first + 32 && i < fiber.block->fibers.size(); i++)
    if (const Fiber& f = fiber.block->fibers[i]; f.waiting && !f.at_barrier && f.mask >> lane & 1)
      fail(format("%s waits for lane %u, which has exited", describe(f).c_str(), lane));
}

// Threads that have exited do not count, as on GPUs since Volta.
int barrier(bool vote, Site site) {
  Block& block = *current->block;
  block.votes += vote;
  block.arrived++;
  current->polled = false;
  current->at_barrier = current->waiting = true;
  current->what = "__syncthreads";
  current->site = site;
  if (block.arrived == block.live) complete_barrier(block);
  back_to_scheduler();
  return block.result;
}

void complete_barrier(Block& block) {
  std::vector<Fiber*> in;
  for (Fiber& f : block.fibers)
    if (f.at_barrier) in.push_back(&f);
  for (size_t i = 1; i < in.size(); i++) {
    const Fiber &a = *in[i - 1], &b = *in[i];
    if (a.index / 32 == b.index / 32 && !same(a.site, b.site))
      report_once(a.site.file + a.site.line, b.site.file + b.site.line,
                  "divergent barrier within a warp: " + where(a) + " meets " + where(b));
  }
  if (run.check) order_all(in);
  block.result = block.votes;
  block.votes = 0;
  block.arrived = 0;
  for (Fiber* f : in) wake(*f);
}

// Return what an operation makes of a word's old value.
template <class T> static T updated(Op op, T old, T v, uint64_t compare) {
  using Signed = std::make_signed_t<T>;
  const bool less = compare ? Signed(v) < Signed(old) : v < old;  // `compare`: T is signed
  switch (op) {
    case load: return old;
    case store: case exch: return v;
    case add: return T(old + v);
    case sub: return T(old - v);
    case and_: return old & v;
    case or_: return old | v;
    case xor_: return old ^ v;
    case inc: return old >= v ? T(0) : T(old + 1);
    case min_: return less ? v : old;
    case max_: return less ? old : v;
    case cas: return old == T(compare) ? v : old;
    case add_float:
      if constexpr (sizeof(T) == 4) return T(bits(unbits<float>(old) + unbits<float>(v)));
      if constexpr (sizeof(T) == 8) return T(bits(unbits<double>(old) + unbits<double>(v)));
  }
  return old;
}

// Other processes may access the word too. Each operation has the strongest order that a kernel
// could ask for, which costs nothing on x86; that a kernel asks for enough, the checker verifies.
template <class T> static uint64_t apply(Op op, T* p, T v, uint64_t compare) {
  T old = __atomic_load_n(p, __ATOMIC_ACQUIRE);
  if (op == load) return old;
  if (op == store) {
    __atomic_store_n(p, v, __ATOMIC_RELEASE);
    return old;
  }
  while (!__atomic_compare_exchange_n(p, &old, updated(op, old, v, compare), false,
                                      __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {}
  return old;
}

// Return whether a thread has loaded an address before, which suggests that it polls. Only one
// address is remembered. It is replaced after 1, 2, 4, ... loads (Brent's algorithm), so that a
// loop which polls several addresses is found as well.
static bool comes_back(Fiber& f, const void* p) {
  if (f.remembered == p) return true;
  if (++f.loads < f.most_loads) return false;
  f.remembered = p;
  f.loads = 0;
  f.most_loads *= 2;
  return false;
}

static void synchronise(Op op, std::vector<Publication>& published, Order order, Scope scope) {
  Fiber& f = *current;
  for (const Publication& q : published) {
    const bool acquires = order == acquire || order == acq_rel;
    if (op != store && acquires && covers(q.scope, q.id, f.id) && covers(scope, f.id, q.id))
      learn(f, *q.clock);
    const auto known = [&](const Publication& s) { return s.clock == q.clock; };
    if (op != store && !acquires && std::none_of(f.seen.begin(), f.seen.end(), known))
      f.seen.push_back({q.clock, q.id, std::min(q.scope, scope)});
  }
  if (op == load) return;
  if (op == store) published.clear();  // a store ends a release sequence, an RMW continues it
  if (order == release || order == acq_rel) published.push_back({release_clock(f), f.id, scope});
  else if (f.released) published.push_back({f.released, f.id, scope});
}

// Yield at random, and always in a load that polls, so that the thread it waits for can run. What
// other processes do is not repeatable, so with them only loads that poll yield.
static void let_others_run(Fiber& f, Op op, const void* p) {
  if (run.processes) {
    if (op != load || !comes_back(f, p)) return;
    f.loads = 0;
    f.most_loads = 1;
    f.remembered = nullptr;
    yield();
  } else if ((op == load && f.polled_at == p) || random_bits() % 4 == 0) {
    yield();
  }
}

uint64_t atomic(Op op, void* p, int bytes, uint64_t value, uint64_t compare, Order order,
                Scope scope, Site site) {
  Fiber& f = *current;
  f.site = site;
  if (uintptr_t(p) & unsigned(bytes - 1))
    fail(format("misaligned %d-byte atomic at %p by %s", bytes, p, where(f).c_str()));
  let_others_run(f, op, p);
  if (run.check) {
    const Kind kind = op == load ? Kind::read : op == store ? Kind::write : Kind::update;
    const bool shared = check(p, size_t(bytes), kind, scope, __builtin_return_address(0));
    synchronise(op, (shared ? f.block->publications : run.publications)[p], order, scope);
  }
  const uint64_t old =
      bytes == 4   ? apply(op, static_cast<uint32_t*>(p), uint32_t(value), compare)
      : bytes == 8 ? apply(op, static_cast<uint64_t*>(p), value, compare)
                   : apply(op, static_cast<uint16_t*>(p), uint16_t(value), compare);
  // A thread may poll several flags in turn: that is no progress.
  if (op != load || (f.polled_at == p && f.polled_value != old)) run.idle = 0;
  f.polled = op == load;
  f.polled_at = p;
  f.polled_value = old;
  return old;
}

void fence(Scope scope) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // for other processes
  if (!run.check) return;
  Fiber& f = *current;
  for (const Publication& p : f.seen)
    if (covers(scope, f.id, p.id) && covers(p.scope, p.id, f.id)) learn(f, *p.clock);
  f.seen.clear();
  f.released = release_clock(f);
}

}  // namespace cuda_host
