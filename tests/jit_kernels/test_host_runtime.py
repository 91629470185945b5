"""What the host runtime executes, and which errors it detects without crashing Python."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.declare.errors import HostFault, LaunchError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World, touchable
from kiln.jit_kernels.toolchains.template import Unit, include_closure

PRELUDE = """
#include "kiln/math/reduce.cuh"
#include "kiln/rows/vec.cuh"
inline int peek(int* p, cuda_host::Order o, cuda_host::Scope s, CUDA_HOST_SITE) {
  return int(cuda_host::atomic(cuda_host::load, p, 4, 0, 0, o, s, site));
}
inline void poke(int* p, int v, cuda_host::Order o, cuda_host::Scope s, CUDA_HOST_SITE) {
  cuda_host::atomic(cuda_host::store, p, 4, unsigned(v), 0, o, s, site);
}
using namespace cuda_host;
"""


def build(body, *, arguments=("pointer",), checked=True):
    """A kernel from the body of ``k(float* p, …)``; a body may give the whole signature."""
    if "__global__" not in body:
        body = f'extern "C" __global__ void k(float* p) {{ {body} }}'
    text = f'{PRELUDE}\n#line 1 "test.cu"\n{body}'
    unit = Unit("test.cu", text, include_closure(text))
    return host.build(unit, "k", arguments, name="k", checked=checked, env=settings())


def launch(body, *values, grid=1, block=32, shared=0, checked=True, **world):
    kinds = ["pointer" if isinstance(v, torch.Tensor) else "int32" for v in values]
    queue = World(checked=checked, seconds=world.pop("seconds", 20.0), **world)
    geometry = LaunchGeometry((grid, 1, 1), (block, 1, 1), shared)
    queue.enqueue(0, build(body, arguments=kinds, checked=checked), geometry, values)
    return queue.run()


def fault(body, *values, **options):
    with pytest.raises(HostFault) as caught:
        launch(body, *values, **options)
    return str(caught.value)


@pytest.fixture
def p():
    return torch.zeros(1024)[:512]


# ---- what it executes ------------------------------------------------------------------------

VOTES = """
const int i = threadIdx.x, lane = i % 32;
p[i] = __shfl_xor_sync(~0u, i, 3) + 1000 * __shfl_down_sync(~0u, i, 5);
p[64 + i] = __shfl_up_sync(~0u, i, 2) + 1000 * __shfl_sync(~0u, i, 7, 16);
p[128 + i] = __ballot_sync(~0u, lane < 3) + 10 * __any_sync(~0u, i == 40)
    + 100 * __all_sync(~0u, i < 32);
p[192 + i] = __syncthreads_count(i % 4 == 0) + 1000 * __syncthreads_or(i == 63)
    + 2000 * __syncthreads_and(i < 63);
"""


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("checked", [False, True])
def test_threads_meet_as_on_a_gpu(p, checked, seed):
    launch(VOTES, p, block=64, checked=checked, seed=seed)
    for i in range(64):
        warp, lane = i // 32 * 32, i % 32
        down = i + 5 if lane + 5 < 32 else i
        up = i - 2 if lane >= 2 else i
        assert p[i] == (warp + (lane ^ 3)) + 1000 * down
        assert p[64 + i] == up + 1000 * (i // 16 * 16 + 7)
        assert p[128 + i] == 7 + 10 * (i >= 32) + 100 * (i < 32)
        assert p[192 + i] == 16 + 1000


ATOMICS = """
int* q = reinterpret_cast<int*>(p);
atomicAdd(p + 1, 0.5f); atomicAdd(q + 2, 2); atomicMax(q + 3, int(threadIdx.x));
atomicMin(q + 4, -int(threadIdx.x)); atomicOr(q + 5, 1 << threadIdx.x % 8);
if (atomicCAS(q + 6, 0, 1) == 0) atomicAdd(q + 7, 1);
atomicExch_system(q + 8, 9); atomicSub_block(q + 9 + blockIdx.x, 1);
"""


@pytest.mark.parametrize("seed", [0, 1])
def test_atomics_count_every_thread(p, seed):
    launch(ATOMICS, p, block=64, grid=3, seed=seed)
    integers = p.view(torch.int32)
    assert p[1] == 96
    assert integers[2:12].tolist() == [384, 63, -63, 255, 1, 1, 9, -64, -64, -64]


@pytest.mark.parametrize("checked", [False, True])
def test_each_block_has_shared_memory_of_its_own(p, checked):
    body = """
    __shared__ float a[64];
    float* b = static_cast<float*>(cuda_host::dynamic_shared());
    a[threadIdx.x] = blockIdx.x * 64 + threadIdx.x;
    b[threadIdx.x] = 2 * a[threadIdx.x];
    __syncthreads();
    p[blockIdx.x * 64 + threadIdx.x] = a[63 - threadIdx.x] + b[63 - threadIdx.x];
    """
    launch(body, p, grid=8, block=64, shared=256, checked=checked, seed=3)
    expected = 3 * torch.arange(512.0).view(8, 64).flip(1).flatten()
    assert torch.equal(p, expected)


def test_an_early_exit_before_a_barrier_is_legal(p):
    launch("if (threadIdx.x >= 40) return; __syncthreads(); p[threadIdx.x] = 1;", p, block=64)
    assert p.sum() == 40


@pytest.mark.parametrize("checked", [False, True])
def test_the_same_seed_is_the_same_run(p, checked):
    body = """int* turn = reinterpret_cast<int*>(p);
    while (peek(turn, acquire, gpu) != threadIdx.x) {}
    poke(turn, threadIdx.x + 1, release, gpu);"""
    counts = [launch(body, p.zero_(), seed=s, checked=checked) for s in (7, 7, 8, 9)]
    assert counts[0] == counts[1]
    assert len(set(counts)) > 1


# ---- what it catches -------------------------------------------------------------------------

BOTH_FORMS = {
    "divergent barrier": (
        "if (threadIdx.x < 8) { p[0] = 1; __syncthreads(); }\nelse { __syncthreads(); }",
        "test.cu:2",
    ),
    "which has exited": (
        "if (threadIdx.x < 16) p[0] = __shfl_xor_sync(~0u, p[1], 1);",
        "test.cu:1",
    ),
    "reads lane 20, not in its mask": (
        "if (threadIdx.x < 16) p[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 20);",
        "test.cu:1",
    ),
    "lacks its own caller": ("p[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0);", "thread (16,0,0)"),
    "warp divergence": (
        "if (threadIdx.x & 1) __shfl_xor_sync(~0u, 1, 1);\nelse __shfl_down_sync(~0u, 1, 1);",
        "test.cu:2",
    ),
    "deadlock: nobody can go on": (
        "if (threadIdx.x < 16) __syncwarp(); else __syncthreads();",
        "16 threads (first 16) of rank 0 block 0: __syncthreads at test.cu:1",
    ),
    "deadlock: every thread waits": (
        "while (peek(reinterpret_cast<int*>(p), acquire, gpu) != 3) {}",
        "polling at test.cu:1, value 0",
    ),
    "polls a flag that nobody will set": (
        "int* f = reinterpret_cast<int*>(p); bool a, b;\n"
        "do { a = peek(f, acquire, gpu) == 3;\nb = peek(f + 1, acquire, gpu) == 3; }\n"
        "while (!__all_sync(~0u, a && b));",
        "test.cu:4",
    ),
}


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("category", BOTH_FORMS)
def test_both_forms_report(p, category, checked):
    body, detail = BOTH_FORMS[category]
    report = fault(body, p, checked=checked)
    assert category in report
    assert detail in report


CHECKED_FORM = {
    "misaligned access": "p[0] = kiln::Vec<float>::load(p + 1).v[0];",
    "out-of-bounds read of 4 bytes": "p[0] = p[512];",
    "out-of-bounds write of 16 bytes": (
        "kiln::Vec<float> v = kiln::Vec<float>::load(p); v.store(p + 512);"
    ),
    "out-of-bounds index": "__shared__ float a[32]; a[threadIdx.x * 2] = 1; p[0] = a[0];",
    "read of uninitialised shared memory": (
        "__shared__ float a[33]; a[threadIdx.x] = 1; p[threadIdx.x] = a[threadIdx.x + 1];"
    ),
    "data race on shared memory": (
        "__shared__ int a[32]; a[threadIdx.x] = 1; p[threadIdx.x] = a[threadIdx.x ^ 1];"
    ),
    "data race on global memory": "if (threadIdx.x < 2) p[0] = threadIdx.x;",
    "bad shift": "p[0] = 1 << (32 + threadIdx.x);",
    "bad division": "p[0] = 5 / threadIdx.x;",
}


@pytest.mark.parametrize("type_name", ["uint16_t", "float", "double"])
def test_an_access_of_any_size_is_at_a_multiple_of_it(p, type_name):
    odd = f"reinterpret_cast<char*>(p) + sizeof({type_name}) / 2"
    for body in (
        f"p[0] = float(*reinterpret_cast<{type_name}*>({odd}));",
        f"*reinterpret_cast<{type_name}*>({odd}) = {type_name}(threadIdx.x);",
    ):
        assert "misaligned access" in fault(body, p)


@pytest.mark.parametrize("category", CHECKED_FORM)
def test_the_checked_form_reports_with_the_kernels_own_line(p, category):
    report = fault(CHECKED_FORM[category], p)
    assert category in report
    assert "test.cu:1" in report


@pytest.mark.parametrize("copies", [1, 4])
def test_an_access_in_a_header_names_its_caller_too(p, copies):
    one = "p[0] += kiln::Vec<float>::load(p + 1).v[0];\n"
    assert "vec.cuh:13, called from test.cu:1" in fault(one * copies, p)


def test_a_shared_overflow_through_a_pointer_is_out_of_bounds(p):
    body = "__shared__ float a[32]; float* b = a + threadIdx.x; b[8] = 1; p[0] = a[0];"
    assert "out-of-bounds write" in fault(body, p)


def test_a_dynamic_shared_overflow_is_out_of_bounds(p):
    body = "static_cast<float*>(cuda_host::dynamic_shared())[threadIdx.x] = p[0];"
    launch(body, p, shared=128)
    assert "out-of-bounds write" in fault(body, p, shared=124)


def test_blocks_race_even_when_they_run_one_after_the_other(p):
    body = "if (threadIdx.x == 0) p[0] += blockIdx.x;"
    assert "data race on global memory" in fault(body, p, grid=2, resident=1)
    launch("if (threadIdx.x == 0) p[blockIdx.x] += blockIdx.x;", p, grid=2)


@pytest.mark.parametrize(("barrier", "block"), [("__syncwarp", 32), ("__syncthreads", 64)])
def test_a_missing_barrier_is_a_race(p, barrier, block):
    body = f"""__shared__ float a[64];
    a[threadIdx.x] = p[threadIdx.x]; {barrier}();
    p[threadIdx.x] = a[blockDim.x - 1 - threadIdx.x];"""
    for seed in range(5):
        launch(body, p, block=block, seed=seed)
        report = fault(body.replace(f"{barrier}();", ""), p, block=block, seed=seed)
        assert "data race on shared memory" in report


def test_a_shuffle_orders_no_memory(p):
    body = """__shared__ float a[32];
    a[threadIdx.x] = 1; __shfl_xor_sync(~0u, 1, 1); p[threadIdx.x] = a[threadIdx.x ^ 1];"""
    assert "data race on shared memory" in fault(body, p)


def test_a_read_of_the_gap_between_strided_rows_is_out_of_bounds(p):
    rows = p.view(8, 64)[:, :60]
    body = "p[blockIdx.x * 64 + threadIdx.x] = 1;"
    launch(body, rows, grid=8, block=60)
    assert "out-of-bounds write" in fault(body, rows, grid=8, block=61)


def test_views_of_one_storage_are_exact():
    storage = torch.zeros(6, 10)
    base = storage.data_ptr()
    assert list(touchable(storage)) == [(base, base + 240)]
    assert list(touchable(storage[:, 2:5])) == [
        (base + 40 * row + 8, base + 40 * row + 20) for row in range(6)
    ]
    assert list(touchable(storage[:, :1].expand(6, 4)))[-1] == (base + 200, base + 204)
    assert list(touchable(storage.t())) == [(base, base + 240)]
    assert not list(touchable(storage[:0]))


def test_a_barrier_that_some_never_reach_ends_at_the_time_limit(p):
    body = """if (threadIdx.x < 32) __syncthreads();
    else while (peek(reinterpret_cast<int*>(p), relaxed, gpu) == 0) __syncwarp();"""
    report = fault(body, p, block=64, seconds=0.2)
    assert "time limit" in report
    assert "__syncthreads at test.cu:1" in report


def test_a_loop_on_plain_memory_ends_at_the_time_limit(p):
    body = """volatile float* q = p; if (threadIdx.x == 0) while (q[0] == 0) {}"""
    assert "time limit: still running is rank 0" in fault(body, p, seconds=0.2)


@pytest.mark.parametrize(
    ("body", "category"),
    [
        ("p[0] = *reinterpret_cast<float*>(threadIdx.x + 16);", "memory fault"),
        ("kiln::Vec<float>::load(p + 1).store(p + 5);", "memory fault"),
        ("p[0] = int(p[1]) / int(threadIdx.x);", "division by zero"),
    ],
)  # fmt: skip
def test_a_processor_fault_in_the_plain_form_is_a_report(p, body, category):
    assert category in fault(body, p, checked=False)


def test_a_stack_overflow_in_the_plain_form_is_a_report(p):
    body = """__attribute__((noinline)) float deep(volatile float* p) {
      volatile float a[1000]; a[0] = p[0]; return deep(a) + a[0]; }
    extern "C" __global__ void k(float* p) { p[0] = deep(p); }"""
    assert "stack overflow" in fault(body, p, checked=False)


PUBLISH = """
extern "C" __global__ void k(float* p, int* count) {
  if (threadIdx.x != 0) return;
  p[1 + blockIdx.x] = 1;
  __threadfence();
  if (atomicAdd(count, 1) != gridDim.x - 1) return;
  __threadfence();
  for (int i = 0; i < gridDim.x; i++) p[0] += p[1 + i];
}
"""


@pytest.mark.parametrize("seed", range(3))
def test_the_last_block_may_read_what_fences_published(p, seed):
    count = torch.zeros(1, dtype=torch.int32)
    launch(PUBLISH, p, count, grid=5, seed=seed)
    assert p[0] == 5
    report = fault(PUBLISH.replace("__threadfence();", ""), p, count.zero_(), grid=5, seed=seed)
    assert "data race on global memory" in report


HANDOVER = """
extern "C" __global__ void k(float* data, int* flag, int rank) {
  if (threadIdx.x != 0) return;
  if (rank == 0) { data[0] = 3; poke(flag, 1, release, sys); }
  else { while (peek(flag, acquire, sys) == 0) {} data[1] = data[0]; }
}
"""


def handover(source, seed):
    data, flag = torch.zeros(2), torch.zeros(1, dtype=torch.int32)
    kernel = build(source, arguments=("pointer", "pointer", "int32"))
    world = World(2, seed=seed, checked=True)
    for rank in (1, 0):
        world.enqueue(rank, kernel, LaunchGeometry((1, 1, 1), (32, 1, 1)), (data, flag, rank))
    world.run()
    return data[1]


@pytest.mark.parametrize("seed", range(4))
def test_ranks_hand_data_over_only_by_release_and_acquire_at_system_scope(seed):
    assert handover(HANDOVER, seed) == 3
    for old, new in [
        ("release, sys", "relaxed, sys"),
        ("acquire, sys", "relaxed, sys"),
        ("release, sys", "release, gpu"),
        ("acquire, sys", "acquire, cta"),
    ]:
        assert old in HANDOVER
        with pytest.raises(HostFault, match="data race on global memory"):
            handover(HANDOVER.replace(old, new), seed)


# One block for each GPU of a launch: they hand over in turn, the last to the first.
RING = """
#include "kiln/ptx/clock.cuh"
extern "C" __global__ void k(uint32_t* data, uint32_t* flags) {
  const unsigned own = blockIdx.y, last = gridDim.y - 1;
  if (threadIdx.x != 0) return;
  if (own != last) while (kiln::load_acquire<kiln::Scope::WAIT>(flags + own + 1) == 0) {}
  data[own] = own == last ? 1 : data[own + 1] + 1;
  kiln::store_release<kiln::Scope::TELL>(flags + own, 1);
}
"""


def ring(seed, *, wait="sys", tell="sys", cooperative=True, gpus=True, blocks=4):
    text = '#include "kiln/ptx/memory.cuh"' + RING.replace("WAIT", wait).replace("TELL", tell)
    kernel = build(text, arguments=("pointer", "pointer"))
    data, flags = torch.zeros(2, blocks, dtype=torch.int32)
    world = World(seed=seed, checked=True, seconds=5)
    grid = LaunchGeometry((1, blocks, 1), (32, 1, 1), 0, cooperative, gpus)
    world.enqueue(0, kernel, grid, (data, flags))
    world.run()
    return data.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_a_cooperative_launch_run_together(seed):
    assert ring(seed) == [4, 3, 2, 1]
    with pytest.raises(HostFault, match="deadlock"):
        ring(seed, cooperative=False, blocks=6)  # four blocks at a time, and the last comes first


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("weak", [{"wait": "gpu"}, {"tell": "gpu"}])
def test_gpu_scope_does_not_reach_from_one_gpu_of_a_launch_to_another(seed, weak):
    assert ring(seed, gpus=False, **weak) == [4, 3, 2, 1]
    with pytest.raises(HostFault, match="data race on global memory"):
        ring(seed, **weak)


# Each rank but the last waits until a limit for the flag of the rank above it.
LIMITED = """
#include "kiln/ptx/clock.cuh"
#include "kiln/ptx/memory.cuh"
extern "C" __global__ void k(uint32_t* flags, uint32_t* waited, int rank, int last, int limit) {
  if (threadIdx.x != 0) return;
  const uint64_t from = kiln::nanoseconds();
  while (rank != last && kiln::load_acquire<kiln::Scope::sys>(flags + rank + 1) == 0)
    if (limit && kiln::nanoseconds() - from > uint64_t(limit) * 1000000000) break;
  waited[rank] = uint32_t((kiln::nanoseconds() - from) / 1000000000);
  kiln::store_release<kiln::Scope::sys>(flags + rank, 1);
}
"""


def limited(seed, *, present, ranks=4, limit=10):
    kernel = build(LIMITED, arguments=("pointer", "pointer", "int32", "int32", "int32"))
    flags, waited = torch.zeros(2, ranks + 1, dtype=torch.int32)
    world = World(ranks, seed=seed, checked=True)
    for rank in present:
        values = (flags, waited, rank, ranks - 1, limit)
        world.enqueue(rank, kernel, LaunchGeometry((1, 1, 1), (32, 1, 1)), values)
    world.run()
    return waited.tolist()[:ranks]


@pytest.mark.parametrize("seed", range(4))
def test_the_clock_stands_still_while_any_thread_goes_on(seed):
    assert limited(seed, present=range(4)) == [0] * 4


@pytest.mark.parametrize("seed", range(4))
def test_when_all_wait_the_clock_goes_on_until_a_limit_is_reached(seed):
    assert limited(seed, present=(0, 1, 2)) == [11, 11, 11, 0]
    assert limited(seed, present=(1, 2), limit=30)[1:] == [31, 31, 0]


def test_a_wait_without_a_limit_is_a_deadlock_though_the_clock_is_read():
    with pytest.raises(HostFault, match="deadlock: every thread waits"):
        limited(0, present=(0,), limit=0)


def test_a_ranks_next_launch_sees_what_the_one_before_wrote(p):
    kernel, world = build("p[threadIdx.x] += blockIdx.x == 0;"), World(checked=True, seed=1)
    for _ in range(3):
        world.enqueue(0, kernel, LaunchGeometry((1, 1, 1), (64, 1, 1)), (p,))
    world.run()
    assert p[:64].eq(3).all()


# ---- what it refuses -------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1025, 1, 1), (1, 1, 65), (32, 33, 1), (0, 1, 1)])
def test_a_block_that_no_gpu_takes_is_refused(p, shape):
    with pytest.raises(LaunchError, match="no GPU supports"):
        World().enqueue(
            0, build("p[0] = 1;", checked=False), LaunchGeometry((1, 1, 1), shape), (p,)
        )


def test_more_shared_memory_than_any_gpu_has_is_refused(p):
    with pytest.raises(LaunchError, match="shared memory"):
        launch("p[0] = 1;", p, shared=228 * 1024)


def test_a_plain_kernel_is_refused_where_checks_were_asked_for(p):
    kernel = build("p[0] = 1;", checked=False)
    with pytest.raises(ValueError, match="built without checks"):
        World(checked=True).enqueue(0, kernel, LaunchGeometry((1, 1, 1), (32, 1, 1)), (p,))


def test_an_empty_grid_runs_nothing(p):
    assert launch("p[0] = 1;", p, grid=0) == 0
    assert p[0] == 0
