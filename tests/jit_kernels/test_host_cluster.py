"""The host runtime across blocks: clusters, ordered counters, early launches; misuse of each."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.declare.errors import HostFault, LaunchError
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, include_closure

HEADERS = ("cluster", "launch", "memory")
INCLUDES = "".join(f'#include "kiln/ptx/{name}.cuh"\n' for name in HEADERS)
INCLUDES += "using namespace kiln;\n"


def build(source, *values, checked=True):
    text = f'{INCLUDES}#line 1 "test.cu"\n{source}'
    kinds = ["pointer" if isinstance(value, torch.Tensor) else "int32" for value in values]
    unit = Unit("test.cu", text, include_closure(text))
    return host.build(unit, "k", kinds, name="k", checked=checked, env=settings())


def launch(source, *values, grid=8, block=64, seed=0, checked=True, shared=0, times=1, early=False):
    kernel, world = build(source, *values, checked=checked), World(checked=checked, seed=seed)
    x, y = grid if isinstance(grid, tuple) else (grid, 1)
    geometry = LaunchGeometry((x, y, 1), (block, 1, 1), shared)
    for _ in range(times):
        world.enqueue(0, kernel, geometry, values, overlaps=early)
    world.run()


def fault(source, *values, **options):
    with pytest.raises(HostFault) as caught:
        launch(source, *values, **options)
    return str(caught.value)


def change(source, old, new):
    assert old in source, "nothing to replace"
    return source.replace(old, new)


# ---- clusters --------------------------------------------------------------------------------

# out = the sum of the cluster's 4 x 64 elements of x, through distributed shared memory.
SUM = """
#define CLUSTER 4
extern "C" __global__ void KILN_CLUSTER(CLUSTER, 1, 1) k(const float* x, float* out) {
  __shared__ float part[64];
  float* total = static_cast<float*>(cuda_host::dynamic_shared());
  const int i = threadIdx.x;
  part[i] = x[blockIdx.x * 64 + i];
  __syncthreads();
  if (i == 0) {
    float sum = 0;
    for (int j = 0; j < 64; j++) sum += part[j];
    *map_shared(total + cluster_rank(), 0) = sum;
  }
  cluster_sync();  // all have written
  float sum = 0;
  for (int r = 0; r < int(cluster_size()); r++) sum += map_shared(total, 0)[r];
  out[blockIdx.x * 64 + i] = sum + map_shared(part, (cluster_rank() + 1) % CLUSTER)[i];
  cluster_sync();  // all have read
}
"""


def tensors():
    return torch.randint(-99, 99, (512,)).float(), torch.empty(512)


@pytest.mark.parametrize("checked", [False, True])
def test_blocks_of_a_cluster_reach_each_others_shared_memory(checked):
    for seed in range(6):
        x, out = tensors()
        launch(SUM, x, out, seed=seed, checked=checked, shared=16)
        rows = x.view(2, 4, 64)
        want = rows.sum((1, 2), keepdim=True) + rows.roll(-1, 1)
        assert torch.equal(out.view_as(want), want)


MISUSE_OF_CLUSTERS = {
    "no barrier before reading": ("cluster_sync();  // all have written", "", "shared memory"),
    "a barrier of the block alone": (
        "cluster_sync();  // all have written", "__syncthreads();", "shared memory"
    ),
    "only the first half of a barrier": (
        "cluster_sync();  // all have written", "cluster_arrive();", "shared memory"
    ),
    "no barrier before the end": (
        "cluster_sync();  // all have read", "", "exit"
    ),
    "a rank beyond the cluster": (
        "map_shared(total + cluster_rank(), 0)", "map_shared(total, 4)",
        "map_shared to rank 4 of a cluster of 4",
    ),
    "global memory": ("map_shared(total, 0)", "map_shared(x, 0)", "memory that is not shared"),
    "past a peer's shared memory": (
        "map_shared(total, 0)[r]", "map_shared(total, 0)[r + 1]", "out-of-bounds read"
    ),
    "two arrivals": ("cluster_sync();  // all have read", "cluster_arrive(); cluster_arrive();",
                     "cluster_arrive twice without a cluster_wait"),
    "a wait without an arrival": ("cluster_sync();  // all have read", "cluster_wait();",
                                  "cluster_wait without a cluster_arrive"),
    "a thread that never arrives": (
        "cluster_sync();  // all have read",
        "if (i) cluster_sync(); else while (load_relaxed(reinterpret_cast<uint32_t*>(out)) != 7);",
        "deadlock",
    ),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", MISUSE_OF_CLUSTERS)
def test_misuse_of_clusters_is_reported(name, seed):
    old, new, category = MISUSE_OF_CLUSTERS[name]
    report = fault(change(SUM, old, new), *tensors(), seed=seed, shared=16)
    assert category in report
    assert "test.cu:" in report


def test_a_peers_shared_memory_that_nobody_wrote_is_uninitialised():
    source = change(SUM, "part[i] = x", "if (i < 63) part[i] = x")
    source = change(source, "j < 64", "j < 63")
    assert "read of uninitialised shared memory" in fault(source, *tensors(), shared=16)


SPLIT = """
extern "C" __global__ void KILN_CLUSTER(2, 1, 1) k(float* x) {
  __shared__ float mine, later;
  if (threadIdx.x == 0) mine = x[blockIdx.x];
  cluster_arrive();
  if (threadIdx.x == 0) later = 1;
  cluster_wait();
  if (threadIdx.x == 0) x[blockIdx.x] += *map_shared(&mine, 1 - cluster_rank());
  cluster_sync();
}
"""


def test_only_what_came_before_the_arrival_is_known_after_the_wait():
    for seed in range(3):
        x = torch.arange(8.0)
        launch(SPLIT, x, seed=seed)
        assert torch.equal(x, torch.arange(8.0) + torch.arange(8.0).view(4, 2).flip(1).flatten())
        report = fault(change(SPLIT, "map_shared(&mine", "map_shared(&later"), x, seed=seed)
        assert "shared memory" in report


WORDS = """
extern "C" __global__ void KILN_CLUSTER(2, 1, 1) k(uint32_t* x) {
  alignas(16) __shared__ uint32_t inbox[4];
  if (threadIdx.x < 4) inbox[threadIdx.x] = ~0u;
  cluster_arrive();
  cluster_wait();  // both are ready
  if (threadIdx.x) return;
  const uint32_t mine[4] = {x[4 * blockIdx.x], x[4 * blockIdx.x + 1], x[4 * blockIdx.x + 2], 7};
  store_words_cluster(map_shared(inbox, 1 - cluster_rank()), mine);
  uint32_t w[4];
  do load_words_cluster(w, inbox);
  while (w[0] == ~0u || w[1] == ~0u || w[2] == ~0u || w[3] == ~0u);
  for (int i = 0; i < 4; i++) x[4 * blockIdx.x + i] = w[i];
}
"""
MISUSE_OF_WORDS = {
    "nobody is ready": ("cluster_wait();  // both are ready", "", "data race on shared memory"),
    "nobody looks": ("do load_words_cluster(w, inbox);", "for (uint32_t& i : w) i = 1; do;",
                     "may exit before its shared memory is reached"),
    "a plain store": ("store_words_cluster(map_shared(inbox, 1 - cluster_rank()), mine);",
                      "map_shared(inbox, 1 - cluster_rank())[0] = mine[0];",
                      "data race on shared memory"),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_who_finds_the_words_of_a_peer_knows_that_they_came(seed):
    x = torch.arange(32, dtype=torch.int32)
    wanted = x.view(4, 2, 4).flip(1).clone()
    wanted[..., 3] = 7
    launch(WORDS, x, seed=seed)
    assert torch.equal(x, wanted.flatten())


@pytest.mark.parametrize("name", MISUSE_OF_WORDS)
def test_misuse_of_words_for_a_peer_is_reported(name):
    old, new, category = MISUSE_OF_WORDS[name]
    x = torch.arange(32, dtype=torch.int32)
    reports = [fault(change(WORDS, old, new), x, seed=seed) for seed in range(3)]
    assert any(category in report for report in reports)


def test_threads_that_have_exited_do_not_count_at_a_clusters_barrier():
    source = change(SUM, "cluster_sync();  // all have read", "if (i < 8) return; cluster_sync();")
    source = change(source, "(cluster_rank() + 1) % CLUSTER)", "cluster_rank())")
    x, out = tensors()
    launch(change(source, "map_shared(total, 0)[r]", "0"), x, out, shared=16)
    assert torch.equal(out, x)


def test_a_kernel_without_a_cluster_is_alone_in_one():
    source = """extern "C" __global__ void k(float* x) {
      __shared__ float s[64];
      s[threadIdx.x] = cluster_size() * 10 + cluster_rank();
      cluster_sync();
      x[threadIdx.x] = map_shared(s, 0)[63 - threadIdx.x];
    }"""
    x = torch.zeros(64)
    launch(source, x, grid=1)
    assert x.eq(10).all()


def test_a_grid_is_a_multiple_of_the_cluster():
    with pytest.raises(LaunchError, match=r"not a multiple of the cluster size \(4, 1\)"):
        launch(SUM, *tensors(), grid=6, shared=16)
    with pytest.raises(LaunchError, match=r"\(2, 2, 1\) must be \(n, 1, 1\) or \(1, n, 1\)"):
        build(change(SUM, "(CLUSTER, 1, 1)", "(2, 2, 1)"), *tensors())


@pytest.mark.parametrize("seed", range(3))
def test_a_cluster_may_lie_along_y(seed):
    source = """extern "C" __global__ void KILN_CLUSTER(1, 2, 1) k(int* x) {
      __shared__ int own;
      if (threadIdx.x == 0) own = blockIdx.y * 10 + blockIdx.x;
      cluster_sync();
      if (threadIdx.x == 0)
        x[blockIdx.y * gridDim.x + blockIdx.x] =
            *map_shared(&own, 1 - cluster_rank()) * 10 + cluster_rank();
      cluster_sync();
    }"""
    x = torch.zeros(4, 3, dtype=torch.int32)
    launch(source, x, grid=(3, 4), seed=seed)
    peers = torch.tensor([1, 0, 3, 2])[:, None] * 10 + torch.arange(3)
    assert torch.equal(x, (peers * 10 + torch.tensor([0, 1, 0, 1])[:, None]).int())
    with pytest.raises(LaunchError, match=r"not a multiple of the cluster size \(1, 2\)"):
        launch(source, x, grid=(4, 3), seed=seed)


# ---- ordered counters ------------------------------------------------------------------------

LAST = """
extern "C" __global__ void k(const float* x, float* part, uint32_t* counter, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    part[blockIdx.x] = x[blockIdx.x];
    last = arrive(counter, gridDim.x - 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last || threadIdx.x) return;
  float sum = 0;
  for (unsigned i = 0; i < gridDim.x; i++) sum += part[i];
  *out = sum;
}
"""
RELAXED = "last = atomicAdd(counter, 1u) == gridDim.x - 1"
ARRIVE = "last = arrive(counter, gridDim.x - 1) == gridDim.x - 1"
CTA = """last = cuda_host::atomic(cuda_host::inc, counter, 4, gridDim.x - 1, 0, cuda_host::acq_rel,
  cuda_host::cta, {__FILE__, __LINE__}) == gridDim.x - 1"""


def counted():
    return torch.arange(8.0), torch.empty(8), torch.zeros(1, dtype=torch.int32), torch.zeros(1)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("scope", ["", "<Scope::sys>"])
def test_the_last_arriver_sees_what_all_wrote_and_the_counter_is_zero_again(checked, scope):
    for seed in range(6):
        x, part, counter, out = counted()
        source = change(LAST, "arrive(", f"arrive{scope}(")
        launch(source, x, part, counter, out, seed=seed, checked=checked, times=3)
        assert out == 28
        assert counter == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("new", "category"),
    [
        (RELAXED, "data race on global memory"),
        (CTA, "data race on global memory"),
        (ARRIVE.replace("== gridDim.x - 1", "== 0"), "data race on global memory"),
        (ARRIVE.replace("arrive(", "arrive<Scope::sys>(1 + "), "out-of-bounds"),
    ],
    ids=["relaxed", "cta scope", "the first arriver reads", "beyond the counters"],
)  # fmt: skip
def test_misuse_of_a_counter_is_reported(new, category, seed):
    assert category in fault(change(LAST, ARRIVE, new), *counted(), seed=seed)


def test_a_counter_wraps_where_it_is_told_and_adds_return_the_old_value():
    source = """extern "C" __global__ void k(uint32_t* p) {
      for (int i = 0; i < 5; i++) p[8 + i] = arrive(p, 2);
      p[16] = arrive(p + 1, 3);
      p[17] = add_acq_rel(p + 2, 5);
    }"""
    p = torch.zeros(32, dtype=torch.int32)
    p[1], p[2] = 9, 7
    launch(source, p, grid=1, block=1)
    assert p[8:13].tolist() == [0, 1, 2, 0, 1]
    assert p[[0, 1, 2, 16, 17]].tolist() == [2, 0, 12, 9, 7]


HANDOVER = """
extern "C" __global__ void k(float* data, uint32_t* flag) {
  if (threadIdx.x) return;
  if (blockIdx.x == 1) { data[0] = 3; store_release(flag, 1); }
  else { while (load_acquire(flag) == 0); data[1] = data[0]; }
}
"""


@pytest.mark.parametrize("seed", range(1, 5))
def test_a_flag_hands_data_over_only_by_release_and_acquire(seed):
    def fresh():
        return torch.zeros(2), torch.zeros(1, dtype=torch.int32)

    data, flag = fresh()
    launch(HANDOVER, data, flag, grid=2, seed=seed)
    assert data.tolist() == [3, 3]
    for old in ("store_release", "load_acquire"):
        source = change(HANDOVER, old, old.split("_")[0] + "_relaxed")
        assert "data race on global memory" in fault(source, *fresh(), grid=2, seed=seed)


# ---- launches that may start before the one ahead has ended ----------------------------------

CHAIN = """
extern "C" __global__ void k(float* x, const float* weight, int n) {
  const float w = weight[threadIdx.x];  // which no kernel writes
  pdl_wait();
  const int from = (blockIdx.x * blockDim.x + threadIdx.x + 64) % n;
  const float v = x[n + from];
  x[(blockIdx.x * blockDim.x + threadIdx.x)] = v + w;
  pdl_launch_dependents();
}
"""
BACK = """
extern "C" __global__ void k(float* x, const float* weight, int n) {
  pdl_wait();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  x[n + i] = x[i];
}
"""


def chain(first, second, *, early, seed):
    x, weight = torch.zeros(1024), torch.ones(64)
    values = (x, weight, 512)
    world = World(checked=True, seed=seed)
    for source in (first, second, first, second):
        geometry = LaunchGeometry((8, 1, 1), (64, 1, 1))
        world.enqueue(0, build(source, *values), geometry, values, overlaps=early)
    world.run()
    return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("early", [False, True])
def test_launches_that_wait_see_what_the_ones_ahead_wrote(early, seed):
    assert chain(CHAIN, BACK, early=early, seed=seed).eq(2).all()


@pytest.mark.parametrize("seed", range(3))
def test_an_early_launch_that_does_not_wait_races_with_the_one_ahead(seed):
    for first, second in [
        (change(CHAIN, "pdl_wait();", ""), BACK),
        (CHAIN, change(BACK, "pdl_wait();", "")),
    ]:
        assert chain(first, second, early=False, seed=seed).eq(2).all()
        with pytest.raises(HostFault, match="data race on global memory"):
            chain(first, second, early=True, seed=seed)


def test_an_early_launch_that_reads_before_it_waits_races_with_the_one_ahead():
    late = change(BACK, "pdl_wait();", "")
    late = change(late, "x[n + i] = x[i];", "float v = x[i]; pdl_wait(); x[n + i] = v;")
    with pytest.raises(HostFault, match="data race on global memory"):
        chain(CHAIN, late, early=True, seed=1)


def test_a_launch_that_never_waits_hides_the_one_ahead_of_it_from_the_next():
    idle = 'extern "C" __global__ void k(float* x, const float* weight, int n) {}'
    x, weight = torch.zeros(1024), torch.ones(64)
    values, geometry = (x, weight, 512), LaunchGeometry((8, 1, 1), (64, 1, 1))
    for middle, races in [(change(idle, "{}", "{ pdl_wait(); }"), False), (idle, True)]:
        world = World(checked=True)
        for source in (CHAIN, middle, BACK):
            world.enqueue(0, build(source, *values), geometry, values, overlaps=True)
        if races:
            with pytest.raises(HostFault, match="data race on global memory"):
                world.run()
        else:
            world.run()


PLAN = """
extern "C" __global__ void k(float* x, const float* weight, int n) {
  pdl_writes_plan();
  if (threadIdx.x < 8) x[blockIdx.x * blockDim.x + threadIdx.x] = weight[threadIdx.x];
}
"""
READER = """
extern "C" __global__ void k(float* x, const float* weight, int n) {
  pdl_reads_plan();
  const float v = x[(blockIdx.x * blockDim.x + 64) % n];
  pdl_wait();
  if (threadIdx.x == 0) x[n + blockIdx.x] = v;
}
"""
IDLE = (
    'extern "C" __global__ void k(float* x, const float* weight, int n) '
    "{ pdl_wait_then_trigger(); }"
)


def planned(*sources, seed=0, early=True):
    x, weight = torch.zeros(1024), torch.ones(64)
    values, geometry = (x, weight, 512), LaunchGeometry((8, 1, 1), (64, 1, 1))
    world = World(checked=True, seed=seed)
    for source in sources:
        overlaps = early or source is not READER
        world.enqueue(0, build(source, *values), geometry, values, overlaps=overlaps)
    world.run()
    return x[512:520]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("between", [(IDLE,), (IDLE, IDLE), (IDLE, BACK)])
def test_a_plan_is_known_before_the_wait_once_a_launch_between_has_waited(between, seed):
    assert planned(PLAN, *between, READER, seed=seed).eq(1).all()


@pytest.mark.parametrize("seed", range(3))
def test_right_behind_its_plan_a_reader_must_not_be_early(seed):
    assert planned(PLAN, READER, seed=seed, early=False).eq(1).all()
    with pytest.raises(HostFault, match="data race on global memory"):
        planned(PLAN, READER, seed=seed)


@pytest.mark.parametrize("body", ["", "pdl_launch_dependents(); pdl_wait();"])
def test_a_launch_that_lets_the_next_one_in_without_having_waited_tells_it_nothing(body):
    with pytest.raises(HostFault, match="data race on global memory"):
        planned(PLAN, change(IDLE, "pdl_wait_then_trigger();", body), READER)
