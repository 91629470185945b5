"""Prefill attention: batch invariance, large pools, plans and errors."""

from __future__ import annotations

import mmap
import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.compile.warmup import jobs_for
from kiln.jit_kernels.declare.catalog import best_form
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import LaunchGeometry
from kiln.jit_kernels.ops.attention.cases import changed, far_greatest, make_case
from kiln.jit_kernels.ops.attention.error import MOST_UNITS, attention_error
from kiln.jit_kernels.ops.attention.reference import attend, scattered
from kiln.jit_kernels.ops.attention_prefill import functions
from kiln.jit_kernels.ops.attention_prefill.functions import (
    launch_paged_prefill,
    paged_prefill,
    plan_prefill,
)
from kiln.jit_kernels.ops.attention_prefill.tiles import (
    TILE_ROWS,
    Tiles,
    is_prefill,
    most_tiles,
    ordered_tiles,
)
from kiln.jit_kernels.ops.attention_prefill.workspace import make_prefill_workspace
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host

HEADS, GROUP, DIM = 2, 3, 64
_MAP_NORESERVE = 0x4000  # of Linux: mmap lacks the name in Python 3.11


class Kernels:
    """Runs operators as their kernels' own source, on a chosen grid and schedule."""

    def __init__(self):
        self.blocks, self.seed, self.launched, self.arch = 4, 0, [], ""

    def call(self, spec, **named):
        a = spec.parameters.Arguments(**named)
        self.launched.append(spec.name)
        if spec.name == "paged_prefill":
            spec = best_form(spec, spec.bind(a).variant, self.arch)
            whole = spec.geometry

            def geometry(variant, sizes, gpu):
                one = whole(variant, sizes, gpu)
                return LaunchGeometry((self.blocks, 1, 1), one.block, one.shared_bytes)

            kernel = host.load(spec, spec.bind(a).variant, checked=False, env=settings())
            spec = replace(spec, geometry=geometry)
            host.launch(kernel, spec, a, seed=self.seed)
        else:
            host.run(spec, a, env=settings())


@pytest.fixture
def kernels(monkeypatch):
    runs = Kernels()
    monkeypatch.setattr(functions, "call", runs.call)
    return runs


def case(requests, seed=0, dtype=torch.bfloat16, **sizes) -> SimpleNamespace:
    torch.manual_seed(seed)
    sizes = {"kv_heads": HEADS, "group": GROUP, **sizes}
    return make_case(sizes, dtype, dtype, DIM, "cpu", requests=requests)


def run(one: SimpleNamespace, workspace=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse as integers, so that a NaN in an unwritten row equals itself."""
    out = torch.full(one.query.shape, float("nan")).to(one.query.dtype)
    lse = torch.full(one.query.shape[:2], float("nan"))
    paged_prefill(**vars(one), out=out, lse=lse, workspace=workspace)
    return out.view(torch.int16), lse.view(torch.int32)


def pick(one: SimpleNamespace, rows: list[int]) -> tuple[SimpleNamespace, torch.Tensor]:
    """Some requests of a call in another order, and the indices of their tokens in the call."""
    starts = one.cu_seqlens_q.tolist()
    tokens = torch.tensor([t for r in rows for t in range(starts[r], starts[r + 1])]).long()
    lengths = [0, *(starts[r + 1] - starts[r] for r in rows)]
    return changed(
        one,
        query=one.query[tokens],
        block_table=one.block_table[rows],
        seq_lens=one.seq_lens[rows],
        cu_seqlens_q=torch.tensor(lengths).cumsum(0).to(torch.int32),
    ), tokens


def random_requests(source: random.Random) -> list[tuple[int, int]]:
    """Requests of 0 to 90 tokens, some of them decode requests, in contexts of up to 200."""
    counts = [
        source.choice([1, 16, 17, source.randint(0, 90)]) for _ in range(source.randint(1, 5))
    ]
    return [(count + source.randint(0, 110), count) for count in counts]


@pytest.mark.parametrize(
    ("arch", "seed"),
    [("sm_80", seed) for seed in range(at_depth(5, 60))]
    + [("sm_90a", seed) for seed in range(at_depth(4, 30))],
)
def test_bits_depend_on_the_own_request_alone(kernels, seed, arch):
    kernels.arch = arch
    source = random.Random(seed)
    requests = random_requests(source)
    window, cap = source.choice([0, 0, 40, -60]), source.choice([0, 5])
    extras = {"window": window, "cap": cap, "sinks": seed % 2}
    whole = case(requests, seed, **extras)
    wanted = run(whole)
    order = list(range(len(requests)))
    source.shuffle(order)
    for rows in (order, *([row] for row in order)):
        kernels.blocks, kernels.seed = source.choice([1, 2, 3, 7]), source.choice([0, 1, 2])
        some, tokens = pick(whole, rows)
        for got, want in zip(run(some), wanted, strict=True):
            assert torch.equal(got, want[tokens])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_small_weights_count_where_the_greatest_has_no_value(kernels, arch, dtype):
    kernels.arch = arch
    one = far_greatest(case([(50, 20)], dtype=dtype))
    out, lse = (
        bits.view(kind) for bits, kind in zip(run(one), (dtype, torch.float32), strict=True)
    )
    done = changed(one, out=out, lse=lse)
    wanted = scattered(done, is_prefill)
    assert 0 < out.abs().max() < 1e-3
    fp16 = dtype == torch.float16
    assert attention_error(done, wanted, is_prefill, fp16_weights=fp16) <= MOST_UNITS


def test_a_target_with_its_own_instructions_has_its_own_kernel():
    spec = find_spec("paged_prefill")
    bf16 = {"scalar_t": "kiln::bf16", "head_tile": "128", "kv_t": "SCALAR_T", "soft_cap": "false"}
    for change, name in [({}, "paged_prefill_wgmma"), ({"head_tile": "256"}, "paged_prefill"),
                         ({"kv_t": "kiln::e4m3"}, "paged_prefill"),
                         ({"soft_cap": "true"}, "paged_prefill")]:  # fmt: skip
        assert best_form(spec, {**bf16, **change}, "sm_90a").name == name
        assert best_form(spec, {**bf16, **change}, "sm_100a") is spec
    jobs = jobs_for([find_spec("paged_prefill_wgmma")], ["sm_80", "sm_90", "sm_90a", "sm_100a"])
    assert {job.arch for job in jobs} == {"sm_90a"}
    built = jobs_for([spec], ["sm_90a"], bf16)
    assert not built, "nothing is compiled that never runs"


def test_a_plan_serves_every_layer_and_the_next_step(kernels):
    workspace = make_prefill_workspace(
        max_requests=4, max_tokens=200, group=GROUP, device=torch.device("cpu"), windows=(0, 30)
    )
    for requests in ([(80, 80), (5, 1)], [(90, 40), (20, 20), (33, 17)], [(3, 1)]):
        for window in (0, 30):
            one = case(requests, window=window)
            plan_prefill(workspace, one.seq_lens, one.cu_seqlens_q, one.query.shape[0])
            wanted = run(one)
            out = torch.full(one.query.shape, float("nan")).to(one.query.dtype)
            launch_paged_prefill(workspace, **vars(one), out=out, lse=torch.empty(0))
            assert torch.equal(out.view(torch.int16), wanted[0])
            kernels.launched.clear()
            for _ in range(2):
                for got, want in zip(run(one, workspace), wanted, strict=True):
                    assert torch.equal(got, want)
            assert kernels.launched == ["paged_prefill"] * 2
            assert not workspace.counter.any()


def test_blocks_beyond_2_to_the_31_elements(kernels):
    one = case([(40, 40)])
    blocks = one.key_pool.shape[0]
    far = 2**31 // one.key_pool[0].numel() // 2 + 1  # the pool holds keys and values
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    size = (far + blocks) * 2 * one.key_pool[0].numel() * 2
    memory = torch.frombuffer(mmap.mmap(-1, size, flags), dtype=torch.bfloat16)
    pools = memory.view(far + blocks, 2, *one.key_pool.shape[1:])  # untouched pages do not exist
    pools[far:, 0], pools[far:, 1] = one.key_pool, one.value_pool
    moved = one.block_table.clone()
    moved[:, :3] += far
    distant = changed(one, key_pool=pools[:, 0], value_pool=pools[:, 1], block_table=moved)
    for got, want in zip(run(distant), run(one), strict=True):
        assert torch.equal(got, want)


def test_blocks_that_no_row_of_a_tile_sees_are_not_read(kernels):
    cases = (case([(33, 33), (65, 20)], seed, group=4) for seed in range(50))
    one = next(one for one in cases if not (one.block_table[one.block_table < 99] == 0).any())
    assert one.key_pool[0].isnan().all(), "block 0 must be nobody's"
    out, _ = run(one)
    assert not out.view(torch.bfloat16).isnan().any()


def test_lse_may_be_left_out(kernels):
    one = case([(30, 30)])
    out = paged_prefill(**vars(one))
    assert torch.equal(out.view(torch.int16), run(one)[0])


def test_the_reference_leaves_other_requests_alone():
    one = case([(20, 20), (9, 3), (40, 16), (18, 17)])
    assert [(a.first_token, a.num_tokens) for a in attend(one, is_prefill)] == [(0, 20), (39, 17)]


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_every_row_once_heaviest_first_within_the_room(seed):
    source = random.Random(seed)
    group, window = source.choice([1, 3, 8]), source.choice([0, 100, -100])
    sizes = [(n + source.randint(0, 900), n) for n in (source.randint(0, 400) for _ in range(9))]
    requests = [Tiles(tokens, length, group, window) for length, tokens in sizes]
    items = ordered_tiles(requests)
    rows = sorted((request, tile) for request, tile, _, _ in items)
    wanted = [
        (request, tile)
        for request, (_, tokens) in enumerate(sizes)
        if is_prefill(tokens)
        for tile in range(-(-tokens * group // TILE_ROWS))
    ]
    assert rows == wanted
    assert len(items) <= most_tiles(len(sizes), sum(tokens for _, tokens in sizes), group)
    weights = [requests[request].weight(tile) for request, tile, _, _ in items]
    slack = max(weights, default=0) / 8 + 1
    assert all(b <= a + slack for a, b in pairwise(weights))


@pytest.mark.parametrize(
    ("named", "error", "says"),
    [
        ({"scale": 0.0}, ValueError, "above 0"),
        ({"k_scale": -1.0}, ValueError, "above 0"),
        ({"out": torch.empty(20, HEADS * GROUP, DIM)}, TypeError, "out is torch.float32"),
        ({"lse": torch.empty(20, 1)}, ValueError, "lse is"),
    ],
)
def test_wrong_input_is_refused_by_name(named, error, says):
    one = case([(20, 20)])
    with pytest.raises(error, match=says):
        paged_prefill(**{**vars(one), **named})


def test_a_workspace_that_is_too_small_or_another_model_s_is_refused(kernels):
    one, device = case([(60, 60)]), torch.device("cpu")
    small = make_prefill_workspace(max_requests=1, max_tokens=20, group=GROUP, device=device)
    with pytest.raises(ValueError, match=r"room for 1 tiles.* may need 2"):
        plan_prefill(small, one.seq_lens, one.cu_seqlens_q, 60)
    other = make_prefill_workspace(max_requests=1, max_tokens=60, group=1, device=device)
    with pytest.raises(ValueError, match="heads per KV head"):
        run(one, other)
