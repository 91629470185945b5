"""All-reduces: one sum for every algorithm, rank, size and schedule; and late ranks."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from all_reduce_worlds import (
    Call,
    Ranks,
    absent,
    chained_calls,
    random_calls,
    rounds,
    same_bits,
    special_calls,
)
from depth import at_depth

from kiln.jit_kernels.declare.errors import HostFault, LaunchError, NoSuchKernel
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU, needs_of
from kiln.jit_kernels.ops.all_reduce.functions import all_reduce, fused_all_reduce_add_rms_norm
from kiln.jit_kernels.ops.all_reduce.layout import ALGORITHMS, MAX_WORLD, MIN_WORLD, Layout
from kiln.jit_kernels.ops.all_reduce.members import Members, virtual_members
from kiln.jit_kernels.ops.all_reduce.modes import ModeConfig, default_modes
from kiln.jit_kernels.ops.all_reduce.record import FUSED, KERNELS
from kiln.jit_kernels.ops.all_reduce.reference import sum_ranks
from kiln.jit_kernels.ops.all_reduce.spec import SPECS
from kiln.jit_kernels.ops.all_reduce.virtual import VirtualGroup
from kiln.jit_kernels.ops.norm.functions import fused_add_rms_norm
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.template import render

WORLDS = range(MIN_WORLD, MAX_WORLD + 1)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def on_host(monkeypatch):
    """Let the public functions run Kiln's own kernels, plain."""
    from kiln.jit_kernels import torch_ops

    def run(spec, a):
        host.run(spec, a, env=settings())

    monkeypatch.setattr(torch_ops, "run", run)


def bits_of(x):
    return x.contiguous().view(torch.uint8)


# ---- one sum -------------------------------------------------------------------------------------


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_every_algorithm_rank_and_size_gives_the_same_bits(on_host, world, dtype):
    group = VirtualGroup(world, "cpu", max_bytes=1200, max_blocks=2)
    for num_bytes in (dtype.itemsize, 15, 16, 250, 1026):
        n = num_bytes // dtype.itemsize
        x = torch.randn(world, n).to(dtype)
        before, want = x.clone(), sum_ranks(x)
        results = [group.all_reduce(x, algorithm) for algorithm in ALGORITHMS]
        assert all(torch.equal(bits_of(row), bits_of(want)) for out in results for row in out)
        assert torch.equal(x, before), "inputs are not written"
    assert not group.late_ranks()
    counters = group.members.buffers[:, group.layout.counters_at :][:, :8].view(torch.int32)
    assert counters.eq(10).all(), "the kernels ran: two of each kind, for five sizes"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_message_of_a_megabyte_goes_round_every_loop(on_host, algorithm):
    group = VirtualGroup(2, "cpu", max_bytes=1 << 20, max_blocks=1)
    x = torch.randn(2, 1 << 19).bfloat16()
    assert torch.equal(group.all_reduce(x, algorithm), sum_ranks(x).expand_as(x))


@pytest.mark.quick(4)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_at_odd_addresses_are_summed_and_nothing_beside_them_is_written(
    on_host, dtype, algorithm
):
    group = VirtualGroup(3, "cpu", max_bytes=400, max_blocks=2)
    whole, room = torch.randn(3, 99).to(dtype), torch.full((3, 99), 7.0).to(dtype)
    x, out = whole[:, 1:90], room[:, 3:92]
    group.all_reduce(x, algorithm, out=out)
    assert torch.equal(out, sum_ranks(x).expand_as(x))
    assert room[:, :3].eq(7).all()
    assert room[:, 92:].eq(7).all()


@pytest.mark.parametrize("kernel", ALGORITHMS)
def test_the_result_may_replace_the_input(on_host, kernel):
    group = VirtualGroup(4, "cpu", max_bytes=400, max_blocks=2)
    x = torch.randn(4, 10, 10)
    want = sum_ranks(x)
    assert group.all_reduce(x, kernel, out=x) is x
    assert torch.equal(x, want.expand_as(x))


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_that_are_easily_got_wrong(kernel, dtype):
    for world in at_depth((5,), (2, 5)):
        group = Ranks(world, 2000, calls=2**32 - 3)
        calls = special_calls([kernel], 5, world, 300, world, dtype)
        group.run(calls, seed=world)
        assert all(call.is_right() for call in calls)
        outs = [call.arguments["out"] for call in calls]
        assert all(torch.equal(bits_of(out[0]), bits_of(row)) for out in outs for row in out)


def test_every_algorithm_has_the_same_bits_of_nan():
    for dtype in at_depth(DTYPES[:1], DTYPES):
        (call,) = special_calls(["two_shot"], 1, 3, 200, 1, dtype)
        seen = []
        for algorithm in ALGORITHMS:
            again = Call.of(algorithm, call.arguments["x"])
            Ranks(3, 800).run([again], seed=2)
            seen.append(bits_of(again.arguments["out"]))
        assert call.arguments["x"].isnan().any()
        assert all(torch.equal(seen[0], one) for one in seen[1:])


@pytest.mark.quick(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "d"), [(1, 8), (3, 64), (5, 61), (2, 1100), (3, 400)])
def test_the_fused_kernel_is_all_reduce_then_add_then_norm_bit_for_bit(on_host, dtype, rows, d):
    group = VirtualGroup(3, "cpu", max_bytes=rows * (4 * d + 16), max_blocks=2)
    for factors in ({}, {"round_once": True}, {"weight_offset": 1.0}):
        x, residual = torch.randn(2, 3, rows, d).to(dtype)
        weight, new = torch.randn(d).to(dtype), residual.clone()
        total = group.all_reduce(x, "two_shot")
        fused_add_rms_norm(total.view(-1, d), new.view(-1, d), weight, 1e-5, **factors)
        norm = weight, 1e-5, group.members
        out = fused_all_reduce_add_rms_norm(x, residual, *norm, **factors)
        assert torch.equal(bits_of(residual), bits_of(new))
        assert torch.equal(bits_of(out), bits_of(total))


def test_rows_that_are_wider_than_threads_hold(on_host):
    d = 16392
    group = VirtualGroup(2, "cpu", max_bytes=2 * d, max_blocks=1)
    x, residual = torch.randn(2, 2, 1, d).bfloat16()
    weight, new = torch.randn(d).bfloat16(), residual.clone()
    total = group.all_reduce(x, "one_shot_push")
    fused_add_rms_norm(total.view(-1, d), new.view(-1, d), weight, 1e-5)
    out = fused_all_reduce_add_rms_norm(x, residual, weight, 1e-5, group.members, out=x)
    assert out is x
    assert torch.equal(bits_of(out), bits_of(total))


# ---- schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_interleavings_of_ranks_change_nothing(kernel, request):
    count = request.config.getoption("interleavings")
    for seed in range(count):
        world, checked = 2 + seed % 3, seed % 4 == 0
        found = rounds(
            render, [kernel], seed, world=world, group={"checked": checked}, count=4,
            size=60 if kernel == FUSED else 150,
        )  # fmt: skip
        assert found is None, f"seed {seed}: {found}"


def test_many_rounds_of_all_kernels_on_one_group():
    group, made = Ranks(3, 2400, calls=2**32 - 3, checked=False), []
    for seed in range(20):
        kernels = [KERNELS[(seed + 3 * i) % 5] for i in range(10)]
        dtype, size = DTYPES[seed % 3], (30, 151, 600)[seed // 2 % 3]
        calls = random_calls(kernels, 10, 3, size, seed, dtype)
        group.run(calls, seed)
        made += calls
    assert len(made) == 200
    assert all(call.is_right() for call in made)
    assert not group.late()


@pytest.mark.quick(9)
@pytest.mark.parametrize(
    "scenario",
    [
        absent,
        partial(rounds, make=special_calls),
        partial(rounds, make=chained_calls, overlaps=True),
        partial(rounds, size=9000, count=4, group={"blocks": 1}),
        partial(rounds, size=1500),
    ],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_scenarios_of_faults_find_nothing_without_one(kernel, scenario):
    heavy = kernel == FUSED and getattr(scenario, "keywords", {}).get("size", 0) > 150
    for seed in range(1 if heavy else 3):
        assert scenario(render, [kernel], seed) is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_calls_of_a_group_at_once_are_caught(kernel):
    assert all(rounds(render, [kernel], seed, streams=2) for seed in range(3))


# ---- late ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_record_names_who_waited_for_whom_in_which_call(kernel):
    group = Ranks(4, 1200, calls=100)
    (call,) = random_calls([kernel], 1, 4, 150, 1, torch.float32)
    group.run([call], seed=3, absent=[2])
    late = {one.rank: one for one in group.late()}
    assert sorted(late) == [0, 1, 3]
    one = late[3]
    x = call.arguments["x"]
    assert (one.missing, one.kernel, one.num_bytes, one.call, one.epoch) == (
        2, kernel, x[0].numel() * 4, 201, 100,
    )  # fmt: skip
    assert one.waited_ms >= 10_000
    assert str(one) == (
        f"rank 3 of 4 waited {one.waited_ms / 1000:.1f} s for rank 2 ({kernel}, "
        f"{one.num_bytes} bytes, call 201)"
    )


def test_a_group_that_was_late_stays_unusable_until_it_is_cleared():
    group = Ranks(2, 400)
    first, second, third = (
        random_calls(["two_shot_push"], 1, 2, 90, i, torch.float32)[0] for i in range(3)
    )
    group.run([first], seed=1, absent=[0])
    group.run([second], seed=1)
    assert second.arguments["out"].isnan().all()
    group.members.layout.clear(group.members.buffers)
    group.run([third], seed=1)
    assert third.is_right()


# ---- the parts in Python -------------------------------------------------------------------------


def test_the_layout_has_room_for_everything_and_nothing_overlaps():
    for world in WORLDS:
        layout = Layout(world, 5, push_bytes=1000, pull_bytes=5001)
        shard = -(-63 // world)
        assert layout.flags_at >= layout.counters_at + 8 * 5
        assert layout.push_at == layout.flags_at + 128 * 5
        assert layout.slot_bytes >= 16 * max(63, 2 * shard)
        assert layout.pull_at == layout.push_at + 2 * world * layout.slot_bytes
        assert layout.area_bytes >= 16 * (world + 1) * -(-313 // world)
        assert layout.num_bytes >= layout.pull_at + 2 * layout.area_bytes
        assert layout.max_world // 2 < layout.world <= layout.max_world
        assert (layout.limit("two_shot"), layout.limit(FUSED)) == (5001, 1000)


@pytest.mark.parametrize("change", [{"world": 1}, {"world": 9}, {"max_blocks": 0}])
def test_a_layout_that_no_group_has_is_refused(change):
    with pytest.raises(ValueError, match="want"):
        Layout(**{"world": 2, "max_blocks": 1, "push_bytes": 1, "pull_bytes": 1} | change)


def test_members_of_the_wrong_shape_are_refused():
    good = virtual_members(Layout(2, 1, 64, 64), "cpu")
    whole = (good.layout, good.buffers, good.peers, good.record, 0)
    for place, bad in [
        (1, good.buffers[:, 16:]),
        (2, good.peers.int()),
        (3, good.record[:1]),
        (4, 1),
    ]:
        changed = [*whole[:place], bad, *whole[place + 1 :]]
        with pytest.raises(ValueError, match="Members"):
            Members(*changed)


def test_modes_try_the_algorithms_in_order():
    config = ModeConfig(100, 300, 200)
    chosen = [config.choose(num_bytes) for num_bytes in (1, 100, 101, 300, 301, 1 << 30)]
    assert chosen == [
        "one_shot_push", "one_shot_push", "two_shot_push", "two_shot_push", "two_shot", "two_shot",
    ]  # fmt: skip
    assert ModeConfig(0, 0, 50).choose(50) == "one_shot_pull"
    assert ModeConfig(0).choose(1) == "two_shot"
    assert [default_modes(world).measured for world in WORLDS] == [False] * 7
    with pytest.raises(ValueError, match="two_shot_push_threshold is -1"):
        ModeConfig(1, -1)


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"algorithm": "ring"}, KeyError, "no all-reduce is named 'ring'"),
        ({"x": torch.ones(2, 33)}, ValueError, "132 bytes; the group's buffers hold 128"),
        ({"x": torch.ones(3, 4)}, ValueError, r"want \[2, \.\.\.\]"),
        ({"x": torch.ones(2, 4).double()}, TypeError, "float64"),
        ({"out": torch.ones(2, 5)}, ValueError, "out is"),
        ({"out": torch.ones(2, 8)[:, ::2]}, ValueError, "must be contiguous"),
    ],
)
def test_wrong_input_is_refused_by_name(change, error, says):
    members = virtual_members(Layout(2, 1, 128, 128), "cpu")
    named = {"x": torch.ones(2, 4), "algorithm": "one_shot_push", "out": None} | change
    with pytest.raises(error, match=says):
        all_reduce(named["x"], members, named["algorithm"], out=named["out"])


def test_torchs_form_needs_all_ranks_in_one_launch():
    whole = virtual_members(Layout(2, 1, 128, 128), "cpu")
    own = Members(whole.layout, whole.buffers[:1], whole.peers, whole.record[:1], 0)
    x = torch.ones(1, 4)
    with pytest.raises(NoSuchKernel, match=r"here are 1 of 2: use torch\.distributed"):
        all_reduce(x, own, "two_shot")


def test_a_rank_alone_needs_a_multiprocessor_for_each_block():
    spec = find_spec("two_shot")
    sizes = {"n": 64, "blocks": 5, "fewer": 0, "alone": 1}
    variant = next(spec.variants(spec.bench_needs))
    with pytest.raises(LaunchError, match="5 blocks on 4 multiprocessors"):
        spec.geometry(variant, sizes, HOST_GPU)
    assert spec.geometry(variant, sizes | {"alone": 0}, HOST_GPU).cooperative


def test_the_grid_is_the_same_for_every_size():
    for spec in SPECS:
        variant = next(spec.variants(spec.bench_needs))
        cases = [sizes for sizes in spec.bench_sizes if spec.cost(variant, sizes).flops]
        grids = {spec.geometry(variant, sizes, HOST_GPU).grid for sizes in cases}
        assert grids == {(16, 8, 1)}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_number_of_ranks_chooses_one_program(spec):
    dtype = needs_of(torch.bfloat16)
    assert len(list(spec.variants({**dtype, "max_world": "4"}))) == 1
    assert len(list(spec.variants())) == 9
    assert spec.lacking({**dtype, "max_world": "16"}) == [
        {"scalar_t": "kiln::bf16", "max_world": "16"}
    ]


def test_sums_survive_torch_compile():
    group = VirtualGroup(2, "cpu", max_bytes=512, max_blocks=1)
    weight = torch.rand(16)

    def block(x, residual):
        total = group.all_reduce(x, "one_shot_push") + 1
        return group.fused_all_reduce_add_rms_norm(total, residual, weight, 1e-5) * 2

    x, residual = torch.randn(2, 2, 4, 16)
    other = residual.clone()
    want = block(x, residual)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, other), want)
    torch.testing.assert_close(other, residual)


def test_a_wrong_bit_is_told():
    x = torch.tensor([[0.0, torch.nan]])
    assert same_bits(x, x.clone())
    assert not same_bits(x, torch.tensor([[-0.0, torch.nan]]))


def test_a_fault_of_the_runtime_is_not_taken_for_a_result():
    group = Ranks(2, 40)
    (call,) = random_calls(["one_shot_push"], 1, 2, 9, 0, torch.float32)
    group.members.peers[1] += group.members.layout.num_bytes
    with pytest.raises(HostFault, match="out-of-bounds"):
        group.run([call], 0)
