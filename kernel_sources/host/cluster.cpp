// Thread block clusters: the cluster barrier, and access to the shared memory of other blocks.
#include <algorithm>

#include "runtime.h"

namespace cuda_host {

unsigned cluster_rank() {
  const Block& block = *current->block;
  return block.number / block.launch->stride % block.launch->cluster;
}
unsigned cluster_size() { return current->block->launch->cluster; }

// Merge the clocks that all threads had on arrival; the cluster's blocks then share `others`.
static void join_clocks(Cluster& cluster) {
  for (Block* block : cluster.blocks) {
    Clock clock = *block->fibers[0].clock;
    const Clock* last = nullptr;
    for (const Fiber& f : block->fibers) {
      if (f.met != Met::arrived) continue;
      if (f.arrival.get() != last) clock.merge(*(last = f.arrival.get()));
      clock.own[f.index] = std::max(clock.own[f.index], f.arrival_epoch);
    }
    block->met = std::make_shared<const Clock>(std::move(clock));
  }
  if (cluster.blocks.size() == 1) return;
  auto all = std::make_shared<Epochs>(*cluster.blocks[0]->met->others);
  const Epochs* last = nullptr;
  for (Block* block : cluster.blocks) {
    const Clock& clock = *block->met;
    if (clock.others.get() != last) raise(*all, 0, *(last = clock.others.get()));
    raise(*all, clock.first, clock.own);
  }
  for (Block* block : cluster.blocks) {
    Clock clock = *block->met;
    clock.others = all;
    block->met = std::make_shared<const Clock>(std::move(clock));
  }
}

static void complete_if_all_arrived(Cluster& cluster) {
  if (!cluster.live || cluster.arrived != cluster.live) return;
  if (run.check) join_clocks(cluster);
  cluster.arrived = 0;
  for (Block* block : cluster.blocks)
    for (Fiber& f : block->fibers) {
      if (f.met != Met::arrived) continue;
      f.met = Met::passed;
      if (f.waiting && f.at_cluster) wake(f);
    }
}

static void enter(const char* what, Site site, Met expected, const char* complaint) {
  Fiber& f = *current;
  f.polled = false;
  f.what = what;
  f.site = site;
  const bool fine = (f.met == Met::no) == (expected == Met::no);
  if (!fine) fail(format("%s %s by %s", what, complaint, where(f).c_str()));
}

void cluster_arrive(Site site) {
  enter("cluster_arrive", site, Met::no, "twice without a cluster_wait");
  Fiber& f = *current;
  f.met = Met::arrived;
  if (run.check) {
    f.arrival = f.clock;
    f.arrival_epoch = f.epoch++;
  }
  f.block->cluster->arrived++;
  complete_if_all_arrived(*f.block->cluster);
}

void cluster_wait(Site site) {
  enter("cluster_wait", site, Met::arrived, "without a cluster_arrive");
  Fiber& f = *current;
  if (f.met == Met::arrived) {
    f.waiting = f.at_cluster = true;
    back_to_scheduler();
    f.at_cluster = false;
  }
  f.met = Met::no;
  if (!run.check) return;
  if (f.clock == f.arrival) f.clock = f.block->met;
  else learn(f, *f.block->met);
}

// Shared memory ends with its block, so accesses by peers must be ordered before the block's exit.
// A write that an atomic read has seen is ordered.
static void check_peers_are_done(const Block& block) {
  Clock known = *block.fibers[0].clock;
  const Clock* last = nullptr;
  for (const Fiber& f : block.fibers)
    if (f.clock.get() != last) known.merge(*(last = f.clock.get()));
  const unsigned first = block.fibers[0].id;
  for (const Region& region : block.regions) {
    if (!region.words) continue;
    const size_t count = ((region.end - 1) >> 3) - (region.begin >> 3) + 1;
    for (size_t i = 0; i < count; i++)
      for (const Access& a : region.words.get()[i].slots)
        if (a.epoch && !a.seen && a.id - first >= block.fibers.size() && a.epoch > known[a.id])
          report_once(a.place(), nullptr,
                      format("block %u may exit before its shared memory is reached at %s",
                             block.number, at(a.place()).c_str()));
  }
}

void thread_exited(Fiber& fiber) {
  Cluster& cluster = *fiber.block->cluster;
  cluster.live--;
  if (fiber.met == Met::arrived) cluster.arrived--;
  if (run.check && cluster.blocks.size() > 1 && !fiber.block->live)
    check_peers_are_done(*fiber.block);
  complete_if_all_arrived(cluster);
}

// Return the peer block whose shared memory holds p; p becomes the address that it uses itself.
Block* find_peer(uintptr_t& p) {
  for (Block* peer : current->block->cluster->blocks) {
    const uintptr_t fixed = uintptr_t(peer->shared.data());
    const uintptr_t dynamic = uintptr_t(peer->dynamic.data());
    if (p - dynamic < peer->dynamic.size()) return peer;
    if (p - fixed >= peer->shared.size()) continue;
    p = p - fixed + uintptr_t(peer->launch->shared.begin);
    return peer;
  }
  return nullptr;
}

void* map_shared(const void* address, unsigned rank, Site site) {
  Fiber& f = *current;
  Block& block = *f.block;
  f.site = site;
  const uintptr_t p = uintptr_t(address), fixed = uintptr_t(block.launch->shared.begin);
  const uintptr_t dynamic = uintptr_t(block.dynamic.data());
  const bool is_dynamic = p - dynamic < block.dynamic.size();
  if (!is_dynamic && p - fixed >= block.shared.size())
    fail(format("map_shared of memory that is not shared by %s", where(f).c_str()));
  if (rank >= block.cluster->blocks.size())
    fail(format("map_shared to rank %u of a cluster of %zu by %s", rank,
                block.cluster->blocks.size(), where(f).c_str()));
  Block& peer = *block.cluster->blocks[rank];
  if (&peer == &block) return const_cast<void*>(address);
  return is_dynamic ? peer.dynamic.data() + (p - dynamic) : peer.shared.data() + (p - fixed);
}

// Programmatic dependent launch: the next launch starts once every block has allowed it or ended.
void launch_dependents() { current->block->lets_in = true; }

// From here on the thread is ordered after the launch ahead. So is the next launch, as it starts
// after a block of this launch that has waited.
void wait_for_launch_ahead() {
  Fiber& f = *current;
  if (!f.block->lets_in) f.block->launch->informed = true;
  const auto& before = run.ranks[f.block->rank].before;
  if (!run.check || f.clock->others == before) return;
  Block& block = *f.block;
  const ClockRef clock = f.clock;
  if (block.waited_from != clock) {  // most threads call this with the same clock
    Clock all{clock->first, clock->own, before};
    const auto own = before->begin() + clock->first;
    raise(all.own, 0, Epochs(own, own + long(all.own.size())));
    if (clock->others != run.ranks[block.rank].start) all.merge(*clock);
    block.waited_from = clock;
    block.waited = std::make_shared<const Clock>(std::move(all));
  }
  f.clock = block.waited;
}

}  // namespace cuda_host
