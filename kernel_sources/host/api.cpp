// The C interface for ctypes, a thread's queries about itself, and reports. A report contains
// "[library+0x12]", which the caller turns into file:line, as addr2line cannot run here.
#include <dlfcn.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>

#include <algorithm>

#include "runtime.h"

extern "C" void* __tls_get_addr(void*);

namespace cuda_host {

uint3 thread_idx() { return current->thread; }
uint3 block_idx() { return current->block->index; }
dim3 block_dim() { return current->block->launch->shape; }
dim3 grid_dim() { return current->block->launch->grid; }
int lane() { return int(current->index % 32); }
void* dynamic_shared() { return current->block->dynamic.data(); }

std::string format(const char* text, ...) {
  char buffer[1024];
  va_list arguments;
  va_start(arguments, text);
  vsnprintf(buffer, sizeof buffer, text, arguments);
  va_end(arguments);
  return buffer;
}

std::string at(const void* pc) {  // address of the call before a return address
  Dl_info info{};
  if (!dladdr(pc, &info) || !info.dli_fname) return "?";
  return format("[%s+0x%zx]", info.dli_fname, uintptr_t(pc) - 1 - uintptr_t(info.dli_fbase));
}

std::string where(const Fiber& f, const void* pc) {
  const uint3 b = f.block->index, t = f.thread;
  const std::string place = pc ? at(pc) : format("%s:%d", f.site.file, f.site.line);
  return format("rank %u block (%u,%u,%u) thread (%u,%u,%u) at %s", f.block->rank, b.x, b.y, b.z,
                t.x, t.y, t.z, f.site.line || pc ? place.c_str() : "an unknown line");
}

void fail(const std::string& report) {
  run.reports.push_back(report);
  run.stopped = true;
  back_to_scheduler();
  __builtin_unreachable();  // a stopped run resumes no fiber
}

void report_once(const void* a, const void* b, const std::string& report) {
  if (run.reports.size() < 20 && run.reported.insert({a, b}).second) run.reports.push_back(report);
}

void describe_stuck(const std::string& why) {
  std::map<std::string, std::pair<unsigned, unsigned>> groups;  // state -> threads, first thread
  for (const Rank& rank : run.ranks)
    for (const auto& block : rank.resident)
      for (const Fiber& f : block->fibers) {
        if (f.done) continue;
        std::string state = f.waiting ? f.what : f.polled ? "polling" : "running";
        if (f.waiting || f.polled) state += format(" at %s:%d", f.site.file, f.site.line);
        if (f.polled) state += ", value " + std::to_string(f.polled_value);
        state = format("of rank %u block %u: ", f.block->rank, f.block->number) + state;
        groups.try_emplace(state, 0, f.index).first->second.first++;
      }
  std::string report = why;
  for (const auto& [state, group] : groups)
    if (report.size() < 4000)
      report += format("\n  %u threads (first %u) ", group.first, group.second) + state;
  run.reports.push_back(report);
  run.stopped = true;
}

// The thread-local segment, in this OS thread, of the library that holds `entry`.
static Segment segment_of(void (*entry)(void**)) {
  Dl_info info;
  link_map* map = nullptr;
  dladdr1(reinterpret_cast<void*>(entry), &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP);
  const auto* elf = static_cast<const ElfW(Ehdr)*>(info.dli_fbase);
  const auto* headers = reinterpret_cast<const ElfW(Phdr)*>(uintptr_t(elf) + elf->e_phoff);
  for (int i = 0; i < elf->e_phnum; i++) {
    if (headers[i].p_type != PT_TLS) continue;
    size_t index[2] = {0, 0};  // module, offset
    dlinfo(map, RTLD_DI_TLS_MODID, &index[0]);
    return {static_cast<char*>(__tls_get_addr(index)), headers[i].p_memsz};
  }
  return {nullptr, 0};
}

}  // namespace cuda_host

using namespace cuda_host;
#define API extern "C" CUDA_HOST_API

API void cuda_host_begin(unsigned ranks, uint64_t seed, unsigned resident, int check,
                         int processes, double seconds) {
  run = Run{seed, seed * 0x9E3779B97F4A7C15ull + 1, resident, check != 0, false,
            processes != 0, seconds};
  run.ranks = std::vector<Rank>(ranks);
}

// Regions must be passed in ascending order and may not overlap.
API void cuda_host_region(uintptr_t begin, size_t bytes) {
  run.regions.push_back({begin, begin + bytes, nullptr});
}

// Returns the bytes of shared memory of a block, static and dynamic.
API size_t cuda_host_enqueue(unsigned rank, void (*entry)(void**), const unsigned* grid,
                             const unsigned* block, size_t dynamic_bytes, void** parameters,
                             unsigned cluster, unsigned stride, int overlaps, int together,
                             int gpus) {
  const dim3 g(grid[0], grid[1], grid[2]), b(block[0], block[1], block[2]);
  const unsigned blocks = g.x * g.y * g.z;
  const Segment shared = segment_of(entry);
  Rank& r = run.ranks[rank];
  // Equal ids count as ordered. A launch that does not overlap the previous one reuses its ids.
  const unsigned threads = blocks * b.x * b.y * b.z, first = overlaps ? r.threads : 0;
  r.threads = std::max(r.threads, first + threads);
  r.queue.push_back({entry, parameters, g, b, dynamic_bytes, shared, blocks, cluster, stride,
                     overlaps != 0, together != 0, gpus != 0, first});
  return shared.size + dynamic_bytes;
}

API size_t cuda_host_run() {
  unsigned total = 0;
  for (Rank& rank : run.ranks) {
    rank.first = total;
    total += rank.threads;
  }
  if (run.check) run.owners.resize(total);
  for (Rank& rank : run.ranks) {
    if (run.check) rank.after.resize(total);
    rank.start = rank.before = std::make_shared<const Epochs>(rank.after);
  }
  schedule();
  run.regions.clear();
  return run.reports.size();
}

API const char* cuda_host_report() {
  static std::string text;
  text.clear();
  for (const std::string& report : run.reports) text += report + "\n";
  return text.c_str();
}
API uint64_t cuda_host_switches() { return run.switches; }
