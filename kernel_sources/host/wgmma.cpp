// wgmma: asynchronous products of four warps. The host computes each warp's part separately, as
// late as a wait allows, so that a kernel that accesses operands or sums too early fails a check.
#include <string.h>

#include "runtime.h"

namespace cuda_host {

// Address of a 16-byte chunk of a row; chunks count from the start of the operand.
static const unsigned char* place(const Panel& x, int row, int chunk) {
  const int bytes = chunk / 8 * x.next + row * 128 + chunk % 8 * 16;
  const uintptr_t p = uintptr_t(x.begin) + uintptr_t(bytes);
  return reinterpret_cast<const unsigned char*>(p ^ (p >> 3 & 0x70));
}

// Check the current thread's share of its warp's reads.
static void check_panels(const Multiplication& m) {
  if (!run.check) return;
  const unsigned lane = current->index % 32, warp = current->index / 32 % 4;
  const auto eights = unsigned(m.of.eights);
  auto each = [&](const Panel& x, unsigned from, unsigned rows, unsigned chunks) {
    for (unsigned i = lane; i < rows * chunks; i += 32) {
      const void* p = place(x, int(from + i / chunks), int(i % chunks));
      if (!check(p, 16, Kind::read, -1, m.pc))
        fail(format("wgmma from memory that is not shared by %s", where(*current).c_str()));
      if (!seen_by_wgmma(p, 16))
        fail(format("wgmma of what was written without publish_to_wgmma after it by %s",
                    where(*current).c_str()));
    }
  };
  if (m.of.a) each(m.of.b, 0, 16, eights);
  else each(m.of.in, warp * 16, 16, 2), each(m.of.b, 0, eights * 8, 2);
}

static Registers* find(Fiber& f, const void* begin) {
  for (Registers& r : f.registers)
    if (r.begin == begin) return &r;
  return nullptr;
}

// Reserve registers for a wgmma.
static Registers& take(const void* begin, size_t words) {
  Fiber& f = *current;
  Registers* r = find(f, begin);
  if (!r) {
    if (!f.fenced)
      fail(format("wgmma takes new registers without a wgmma_fence before it by %s",
                  where(f).c_str()));
    auto* at = static_cast<uint32_t*>(const_cast<void*>(begin));
    f.registers.push_back({at, {at, at + words}, 0});
    r = &f.registers.back();
  }
  if (r->words.size() != words || (!r->users && memcmp(begin, r->words.data(), words * 4)))
    fail(format("wgmma takes registers that were written after the last wgmma_fence by %s",
                where(f).c_str()));
  r->users++;
  return *r;
}

// Release a wgmma's registers. A sum is stored once no pending wgmma adds to it.
static void give_back(const void* begin, bool sum) {
  Registers& r = *find(*current, begin);
  if (--r.users || !sum) return;
  for (size_t i = 0; i < r.words.size(); i++)
    if (r.begin[i] != ~0u)
      fail(format("the sum of a wgmma was written before its wgmma_wait by %s",
                  where(*current).c_str()));
  memcpy(r.begin, r.words.data(), r.words.size() * 4);
}

void wgmma(const WgmmaOperands& of, Site site) {
  Fiber& f = *current;
  f.site = site;
  if (f.block->fibers.size() < f.index / 128 * 128 + 128)
    fail(format("wgmma needs four whole warps: %s", where(f).c_str()));
  Multiplication m{of, {}, f.wgmma_group, false, __builtin_return_address(0)};
  if (of.a) memcpy(m.a, take(of.a, 4).words.data(), sizeof m.a);
  if (take(of.d, size_t(of.eights) * 4).users == 1)
    memset(of.d, kPoison, size_t(of.eights) * sizeof *of.d);
  check_panels(m);
  f.multiplications.push_back(m);
  f.wgmmas++;
  warp(warp_wgmma, ~0u, 0, nullptr, 0, site);
}

void wgmma_fence() {
  Fiber& f = *current;
  f.fenced = true;
  for (Registers& r : f.registers)
    if (!r.users) r.words.assign(r.begin, r.begin + r.words.size());
}

void wgmma_commit() { current->wgmma_group++; }

void wgmma_wait(int pending, Site site) {
  Fiber& f = *current;
  f.site = site;
  size_t done = 0;
  for (const Multiplication& m : f.multiplications) {
    if (m.group + unsigned(pending) >= f.wgmma_group) break;
    check_panels(m);
    if (m.of.a && memcmp(m.a, m.of.a, sizeof m.a))
      fail(format("registers of a wgmma were written before its wgmma_wait by %s",
                  where(f).c_str()));
    done++;
  }
  warp(warp_wgmma_wait, ~0u, int(done), nullptr, 0, site);
  if (done) f.fenced = false;  // after a wait, threads may write registers
  for (size_t i = 0; i < done; i++) {
    const WgmmaOperands& of = f.multiplications[i].of;
    if (of.a) give_back(of.a, false);
    give_back(of.d, true);
  }
  f.multiplications.erase(f.multiplications.begin(), f.multiplications.begin() + long(done));
}

void publish_to_wgmma() {
  if (run.check) current->published = current->epoch++;
}

// D (16 x 8 N) += A (16 x 16) B (16 x 8 N) for one warp, in the order of mma().
static void multiply(Fiber* lanes, size_t number) {
  const WgmmaOperands& of = lanes[0].multiplications[number].of;
  float a[16][16], b[16][128];
  auto at = [&](const Panel& x, int row, int column) {
    uint16_t v;
    memcpy(&v, place(x, row, column / 8) + column % 8 * 2, 2);
    return widen(v, of.bf16);
  };
  for (int i = 0; i < 32; i++)
    for (int r = 0; r < 4; r++)
      for (int half = 0; half < 2; half++) {
        const int row = i / 4 + r % 2 * 8, k = i % 4 * 2 + r / 2 * 8 + half;
        const uint32_t pair = lanes[i].multiplications[number].a[r];
        a[row][k] = of.a ? widen(uint16_t(pair >> half * 16), of.bf16)
                         : at(of.in, int(lanes[0].index / 32 % 4) * 16 + row, k);
      }
  for (int k = 0; k < 16; k++)
    for (int n = 0; n < of.eights * 8; n++) b[k][n] = of.a ? at(of.b, k, n) : at(of.b, n, k);
  for (int i = 0; i < 32; i++) {
    Multiplication& m = lanes[i].multiplications[number];
    auto* d = reinterpret_cast<float*>(find(lanes[i], m.of.d)->words.data());
    m.done = true;
    for (int n = 0; n < of.eights; n++)
      for (int j = 0; j < 4; j++, d++) {
        float sum = of.adds ? *d : 0.0f;
        for (int k = 0; k < 16; k++)
          sum += a[i / 4 + j / 2 * 8][k] * b[k][n * 8 + i % 4 * 2 + j % 2];
        *d = sum;
      }
  }
}

void multiply_for_group(WarpOp op, Fiber* lanes) {
  size_t count = lanes[0].multiplications.size();
  if (op == warp_wgmma_wait) count = size_t(lanes[0].value);
  else if (!run.seed || random_bits() % 4) return;
  for (size_t i = 0; i < count; i++)
    if (!lanes[0].multiplications[i].done) multiply(lanes, i);
}

void check_groups(const Block& block) {
  for (const Fiber& f : block.fibers) {
    const Fiber& first = block.fibers[f.index / 128 * 128];
    if (f.wgmmas != first.wgmmas)
      fail(format("%u wgmma by %s, and %u by thread %u of the same four warps", f.wgmmas,
                  where(f).c_str(), first.wgmmas, first.index));
  }
}

}  // namespace cuda_host
