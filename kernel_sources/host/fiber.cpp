// Fibers: their stacks, the switch between them, per-block shared memory, and memory faults.
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime.h"

extern "C" void cuda_host_switch(void** save, void* to);
// Save the callee-saved registers on this stack, then continue on the other stack.
#if defined(__x86_64__)
asm(R"(.text
.type cuda_host_switch,@function
cuda_host_switch:
  push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp, (%rdi); mov %rsi, %rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp
  ret
)");
static constexpr int kFrameWords = 8, kReturnWord = 6;
#elif defined(__aarch64__)  // written from the procedure call standard; not tested yet
asm(R"(.text
.type cuda_host_switch,%function
cuda_host_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]; stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]; stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x2, sp; str x2, [x0]; mov sp, x1
  ldp x19, x20, [sp]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]; ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]; ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
static constexpr int kFrameWords = 20, kReturnWord = 11;
#else
#error "the host toolchain runs on x86-64 and aarch64"
#endif

namespace cuda_host {

Fiber* current;
static void* scheduler_stack;
static std::vector<char*> free_stacks;  // LIFO: a kernel that never waits stays in cache

static void add_stack() {
  static unsigned made;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (stack == MAP_FAILED) abort();
  // A guard page splits a mapping in two, and Linux allows a process 65530 mappings.
  if (++made < 16384) mprotect(stack, 4096, PROT_NONE);
  free_stacks.push_back(static_cast<char*>(stack));
}

static void prepare(Fiber& fiber) {
  if (free_stacks.empty()) add_stack();
  fiber.stack = free_stacks.back();
  free_stacks.pop_back();
  // Stack tops at equal distances modulo the cache size would evict each other: spread over 64 KiB.
  const uintptr_t colour = uintptr_t(fiber.stack) / kStackBytes * 1088 % (64 << 10);
  void** top = reinterpret_cast<void**>(fiber.stack + kStackBytes - colour) - 2 - kFrameWords;
  memset(top, 0, sizeof(void*) * kFrameWords);
  top[kReturnWord] = reinterpret_cast<void*>(fiber_main);
  fiber.stack_pointer = top;
}

// Copy the block's __shared__ variables into the thread-local segment of its library.
static void bring_shared(Block& block) {
  Block* owner = run.shared_owner;
  if (owner == &block) return;
  if (owner) memcpy(owner->shared.data(), owner->launch->shared.begin, owner->shared.size());
  memcpy(block.launch->shared.begin, block.shared.data(), block.shared.size());
  run.shared_owner = &block;
}

void resume(Fiber& fiber) {
  if (!fiber.stack_pointer) prepare(fiber);
  bring_shared(*fiber.block);
  current = &fiber;
  cuda_host_switch(&scheduler_stack, fiber.stack_pointer);
  current = nullptr;
}

void back_to_scheduler() { cuda_host_switch(&current->stack_pointer, scheduler_stack); }

void release_stack(Fiber& fiber) {
  if (fiber.stack) free_stacks.push_back(fiber.stack);
  fiber.stack = nullptr;
}

static constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
static struct sigaction old_actions[3];
static stack_t old_stack;
static pthread_t runner;

// Return to the scheduler, as longjmp does. Faults of other threads go to the previous handler.
static void on_fault(int signal, siginfo_t* info, void*) {
  if (!current || !pthread_equal(pthread_self(), runner)) {
    for (int i = 0; i < 3; i++)
      if (kSignals[i] == signal) sigaction(signal, &old_actions[i], nullptr);
    return;
  }
  const bool guard = uintptr_t(info->si_addr) - uintptr_t(current->stack) < 4096;
  const char* what = guard ? "stack overflow" : "memory fault";
  if (signal == SIGFPE) what = "division by zero";
  fail(format("%s at %p by %s (the checked form names the line)", what, info->si_addr,
              where(*current).c_str()));
}

FaultGuard::FaultGuard() {
  static char stack[64 << 10];
  stack_t alternative{};
  alternative.ss_sp = stack;
  alternative.ss_size = sizeof stack;
  sigaltstack(&alternative, &old_stack);
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  runner = pthread_self();
  for (int i = 0; i < 3; i++) sigaction(kSignals[i], &action, &old_actions[i]);
}

FaultGuard::~FaultGuard() {
  for (int i = 0; i < 3; i++) sigaction(kSignals[i], &old_actions[i], nullptr);
  sigaltstack(&old_stack, nullptr);
}

}  // namespace cuda_host
