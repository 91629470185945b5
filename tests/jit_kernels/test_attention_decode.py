"""Decode attention beyond its cases: memory bounds, capacities, large pools, errors."""

from __future__ import annotations

import math
import mmap
import random
from dataclasses import replace

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU, Gpu
from kiln.jit_kernels.ops.attention.cases import FAR, changed, far_greatest, make_case
from kiln.jit_kernels.ops.attention.error import MOST_UNITS, attention_error
from kiln.jit_kernels.ops.attention.reference import attend, scattered
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK
from kiln.jit_kernels.ops.attention_decode import functions
from kiln.jit_kernels.ops.attention_decode.functions import (
    launch_paged_attention,
    paged_attention,
    plan_attention,
)
from kiln.jit_kernels.ops.attention_decode.splits import UNSENT, Part, Shape, SplitRule, is_decode
from kiln.jit_kernels.ops.attention_decode.workspace import make_workspace, workspace_for
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import render

CPU = torch.device("cpu")
SIZES = {"kv_heads": 2, "group": 4}
MIXED = [(0, 1), (1, 1), (40, 1), (300, 4), (60, 17), (0, 0), (33, 1)]


def case_of(requests, seed=0, dtype=torch.bfloat16, head_dim=64, kv_dtype=None, **sizes):
    torch.manual_seed(seed)
    return make_case(
        {**SIZES, **sizes}, dtype, kv_dtype or dtype, head_dim, "cpu", requests=requests
    )


def on_host(monkeypatch, checked=True):
    """Make the operators run the kernels' own source on the host, like KILN_CPU_KERNELS."""

    def call(spec, **named):
        a = spec.parameters.Arguments(**named)
        host.run(spec, a, checked=checked, env=settings())

    monkeypatch.setattr(functions, "call", call)


def run(case, **named):
    """Call the public function on a case."""
    return paged_attention(**vars(case), **named)


def error(case, out, lse, before=None):
    after = changed(case, out=torch.zeros_like(out) if before is None else before, lse=lse)
    wanted = scattered(after, is_decode)
    fp16 = case.query.dtype == torch.float16 or case.key_pool.dtype == torch.float8_e4m3fn
    return attention_error(changed(after, out=out), wanted, is_decode, fp16_weights=fp16)


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_the_public_function_plans_for_itself(monkeypatch, kernel):
    if kernel:
        on_host(monkeypatch)
    case = case_of(MIXED, sinks=1)
    out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
    assert run(case, out=out, lse=lse) is out
    assert error(case, out, lse) <= MOST_UNITS
    without = run(changed(case, query=case.query.contiguous()))
    alone = torch.ones(len(out), dtype=torch.bool)
    alone[7:24] = False  # of the request with 17 tokens: it is not written
    assert torch.equal(without[alone], out[alone])


def test_a_request_of_prefill_is_left_alone(monkeypatch):
    on_host(monkeypatch)
    case = case_of(MIXED)
    out, lse = torch.full_like(case.query, 7.0), torch.full(case.query.shape[:2], 7.0)
    run(case, out=out, lse=lse)
    rows = slice(7, 24)
    assert (out[rows] == 7).all()
    assert (lse[rows] == 7).all()
    assert not (torch.cat((out[:7], out[24:])) == 7).any()


def test_one_workspace_serves_steps_of_any_lengths_and_two_windows(monkeypatch):
    on_host(monkeypatch)
    workspace = make_workspace(
        max_requests=8, max_tokens=40, max_blocks=40, num_heads=8, num_kv_heads=2, head_dim=64,
        kv_dtype=torch.bfloat16, device=CPU, windows=(0, 50), rule=SplitRule(40, 1, 40),
    )  # fmt: skip
    for seed in range(at_depth(2, 4)):
        lengths = random.Random(seed).sample((0, 0, 1, 30, 256, 400, 600), 5)
        case = case_of([(length, 1) for length in lengths], seed)
        plan_attention(workspace, case.block_table, case.seq_lens, case.cu_seqlens_q, 5)
        for window in (0, 50):
            windowed = changed(case, window=window)
            out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
            run(windowed, out=out, lse=lse, workspace=workspace)
            assert error(windowed, out, lse) <= MOST_UNITS
            assert not workspace.arrivals.any()
            assert (workspace.mail == UNSENT).all()


def test_a_launch_checks_nothing_but_the_names(monkeypatch):
    case = case_of([(40, 1), (300, 4)])
    workspace = workspace_for(case)
    plan_attention(workspace, case.block_table, case.seq_lens, case.cu_seqlens_q, 5)
    wanted, out, lse = run(case, workspace=workspace), torch.zeros_like(case.query), torch.empty(0)
    monkeypatch.delattr(functions, "checked")
    launch_paged_attention(workspace, **vars(case), out=out, lse=lse)
    assert torch.equal(out, wanted)
    with pytest.raises(TypeError, match=r"missing: \['lse'\]"):
        launch_paged_attention(workspace, **vars(case), out=out)


def test_a_step_that_the_workspace_may_not_hold_is_refused_with_the_numbers():
    workspace = make_workspace(
        max_requests=4, max_tokens=4, max_blocks=64, num_heads=8, num_kv_heads=2, head_dim=64,
        kv_dtype=torch.bfloat16, device=CPU, rule=SplitRule(4, 16, 4),
    )  # fmt: skip
    case = case_of([(40, 1)] * 5)
    with pytest.raises(ValueError, match=r"room for 4 requests, 16 work items.* may need 5"):
        plan_attention(workspace, case.block_table, case.seq_lens, case.cu_seqlens_q, 5)
    with pytest.raises(ValueError, match=r"window 9 is not one of the workspace's: \[0\]"):
        run(changed(case, window=9), workspace=workspace)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)]
)
def test_pieces_of_a_split_are_added_up_as_the_split_is(monkeypatch, head_dim, dtype):
    on_host(monkeypatch)
    bits = Shape(head_dim, 2).warp_bits
    requests = [(0, 1), (40, 1), (777, 2), (1500, 1)]
    case = changed(case_of(requests, dtype=dtype, head_dim=head_dim, steep=6), window=0)
    kinds, results = [], []
    for most in (4, 8, 16):
        rule = SplitRule(most, 64, 4, warp_bits=bits)
        workspace = make_workspace(
            max_requests=4, max_tokens=5, max_blocks=94, num_heads=8, num_kv_heads=2,
            head_dim=head_dim, kv_dtype=dtype, device=CPU, rule=rule,
        )  # fmt: skip
        plan_attention(workspace, case.block_table, case.seq_lens, case.cu_seqlens_q, 5)
        table = workspace.items[0]
        kinds.append({Part(place >> 29) for place in table[1 : 1 + table[0, 0], 4].tolist()})
        out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
        run(case, out=out, lse=lse, workspace=workspace)
        results.append((out, lse))
    assert kinds[0] == {Part.SPLIT, Part.SPLIT_IN_UNITS}
    assert kinds[1] == {Part.SPLIT, Part.HALF}
    assert kinds[2] == {Part.SPLIT, Part.QUARTER if bits == 2 else Part.HALF}
    assert all(torch.equal(a, b) and torch.equal(b, c) for a, b, c in zip(*results, strict=True))


@pytest.mark.quick(4)
@pytest.mark.parametrize("size", [2.0**-90, 2.0**-30, 2.0**30, 2.0**90])
@pytest.mark.parametrize("group", [4, 12])
def test_queries_of_any_size_beside_bytes(monkeypatch, size, group):
    """The kernel multiplies in fp16, whose range is far smaller than that of bf16."""
    on_host(monkeypatch)
    case = case_of([(0, 1), (40, 1), (100, 2)], kv_dtype=torch.float8_e4m3fn, group=group)
    case.query[..., 40:] *= 16
    case.query[:, 1] = 0
    case = changed(case, query=case.query * size, scale=case.scale / 16 / size)
    lse = torch.zeros(case.query.shape[:2])
    assert error(case, run(case, lse=lse), lse) <= MOST_UNITS


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_small_weights_count_where_the_greatest_has_no_value(monkeypatch, dtype, kv_dtype):
    on_host(monkeypatch)
    case = far_greatest(case_of([(30, 1)], dtype=dtype, kv_dtype=kv_dtype))
    out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
    run(case, out=out, lse=lse)
    assert 0 < out.abs().max() < 1e-3
    assert error(case, out, lse) <= MOST_UNITS


@pytest.mark.quick(1)
@pytest.mark.parametrize("tile", ["64", "128", "256"])
def test_with_the_stages_that_a_smaller_multiprocessor_has_room_for(tile):
    spec = find_spec("paged_attention")
    smaller = Gpu(num_multiprocessors=4, max_shared_bytes=163 * 1024)
    variant = next(spec.variants({"scalar_t": "kiln::bf16", "head_tile": tile}))
    unit, header = render(spec, variant), "kiln/ptx/launch.cuh"
    text = unit.headers[header].replace("106 * 1024;  // like Hopper", "70 * 1024;")
    assert text != unit.headers[header]
    kernel = host.build(
        replace(unit, headers={**unit.headers, header: text}), spec.entry, spec.c_types,
        name="smaller", checked=True, env=settings(),
    )  # fmt: skip
    for sizes in spec.sizes[2:6]:
        torch.manual_seed(0)
        a = spec.make_arguments(variant, sizes, "cpu")
        wanted, bound, world = spec.reference(a), spec.bind(a), World(checked=True)
        geometry = spec.geometry(variant, bound.sizes, smaller)
        assert geometry.shared_bytes < spec.shared_bytes(variant, HOST_GPU)
        world.enqueue(0, kernel, geometry, spec.kernel_values(a, bound))
        world.run()
        assert spec.error(a, wanted) <= MOST_UNITS


@pytest.mark.quick(1)
@pytest.mark.parametrize("room", [6000, 8000], ids=["too-small", "enough"])
def test_more_requests_than_the_plan_has_threads(room):
    spec = find_spec("attention_plan")
    lengths = torch.tensor([length % 700 for length in range(1300)], dtype=torch.int32)
    items = torch.full((1 + room + 20, 16), -1, dtype=torch.int32)
    a = spec.parameters.Arguments(
        items=items[: 1 + room],
        block_table=torch.randint(9999, (1300, 44), dtype=torch.int32),
        seq_lens=lengths,
        cu_seqlens_q=torch.arange(1301, dtype=torch.int32),
        shared=torch.zeros(1300, dtype=torch.int32),
        group=4,
        window=0,
        **SplitRule(33, 4, 33).arguments(),
    )
    wanted = spec.reference(a)["items"]
    assert wanted[0, 0] == min(room, 7281)
    host.run(spec, a, env=settings())
    assert torch.equal(a.items, wanted)
    assert (items[1 + room :] == -1).all()


def test_nothing_at_or_past_a_length_is_read(monkeypatch):
    """The checker allows only the bytes of the pool and the table that belong to a request."""
    case = case_of([(37, 1), (0, 1), (300, 3), (16, 1)])
    lengths = case.seq_lens.tolist()

    def only_own(spec, **named):
        a = spec.parameters.Arguments(**named)
        bound, world = spec.bind(a), World(checked=True, seed=1)
        values = list(spec.kernel_values(a, bound))
        passed = [one.name for one in spec.parameters.passed]

        def hide(name):  # an address allows no bytes, a tensor all of its bytes
            values[passed.index(name)] = getattr(a, name).data_ptr()

        hide("block_table")
        for row, length in enumerate(lengths):
            world.allow(case.block_table[row, : -(-length // KV_BLOCK)])
        for pool in ("key_pool", "value_pool") if spec.name == "paged_attention" else ():
            hide(pool)
            for row, length in enumerate(lengths):
                for place in range(0, length, KV_BLOCK):
                    block = case.block_table[row, place // KV_BLOCK]
                    for rows in getattr(case, pool)[block]:  # of one head
                        world.allow(rows[: length - place])
        kernel = host.load(spec, bound.variant, checked=True, env=settings())
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        world.enqueue(0, kernel, geometry, values)
        world.run()

    monkeypatch.setattr(functions, "call", only_own)
    out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
    run(case, out=out, lse=lse)
    assert error(case, out, lse) <= MOST_UNITS
    case.seq_lens[0] = 38
    with pytest.raises(HostFault, match="out-of-bounds"):
        run(case)


def far_case(folder):
    """Move a case's blocks 2^28 elements apart, in a sparse file."""
    near = case_of([(40, 1), (70, 2)])
    count, step = near.key_pool.shape[0], 2**28
    with (folder / "sparse").open("w+b") as file:
        file.truncate(count * step * 2)
        region = mmap.mmap(file.fileno(), count * step * 2)
    memory = torch.frombuffer(region, dtype=torch.bfloat16)
    shape, strides = near.key_pool.shape, (step, 16 * 64, 64, 1)
    pools = [memory.as_strided(shape, strides, offset) for offset in (0, 2**27)]
    for pool, source in zip(pools, (near.key_pool, near.value_pool), strict=True):
        pool.copy_(source)
    assert (count - 1) * step > 2**31
    return near, changed(near, key_pool=pools[0], value_pool=pools[1])


def test_pools_beyond_two_to_the_31_elements(monkeypatch, tmp_path):
    on_host(monkeypatch, checked=False)
    near, far = far_case(tmp_path)
    assert torch.equal(run(near), run(far))


def test_a_32_bit_offset_is_caught(tmp_path):
    spec = find_spec("paged_attention")
    _, far = far_case(tmp_path)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "call", lambda spec, **named: seen.append((spec, named)))
        run(far)
    *plans, (spec, named) = seen
    for plan, planned in plans:
        host.run(plan, plan.parameters.Arguments(**planned), env=settings())
    a = spec.parameters.Arguments(**named)
    bound = spec.bind(a)
    unit = render(spec, bound.variant)
    header = "attention_decode/fetch.cuh"
    text = unit.headers[header].replace("id[m] * block", "int(id[m] * block)")
    assert text != unit.headers[header]
    short = replace(unit, headers={**unit.headers, header: text})
    kernel = host.build(
        short, spec.entry, spec.c_types, name="32 bits", checked=True, env=settings()
    )
    try:
        host.launch(kernel, spec, a)
    except HostFault:
        return
    assert not error(far, a.out, torch.zeros(0)) <= MOST_UNITS


def test_logits_of_hundreds_leave_no_infinity(monkeypatch):
    on_host(monkeypatch)
    case = case_of([(64, 1), (300, 2), (500, 1)], soft_cap=0)
    case = changed(case, scale=case.scale * 40)
    out, lse = torch.zeros_like(case.query), torch.zeros(case.query.shape[:2])
    run(case, out=out, lse=lse)
    assert out.isfinite().all()
    for one in attend(case, is_decode, wide=True):
        assert ((out[one.rows] - one.out).abs() <= 2**-7 * one.bound + 2e-4).all()


def test_no_other_row_decides_when_a_rows_weights_are_rescaled(monkeypatch):
    """Head 0's second pair of blocks begins with a logit that its top plus 14 is rounded up to."""
    on_host(monkeypatch)
    case = case_of([(256, 1)], dtype=torch.float16, kv_heads=1, group=2)  # a warp: two pairs
    case = changed(case, scale=math.log(2.0), k_scale=1.0, v_scale=1.0)  # logits in units of log2
    first, fine = 0.625 + 515 * 2.0**-21, 2.0**-10
    least = (torch.tensor(first) - 6 + 14).item()
    assert least - 8 > first, "rounded up"
    query, keys = torch.zeros_like(case.query), torch.zeros(256, 64)
    query[0, 0, :2], query[0, 1, 2] = torch.tensor([1, fine]), 1
    keys[:, 0] = torch.rand(256) - 2
    keys[34:64, 0] -= 15  # weights that fp16 rounds, by how near they are to the top
    keys[0, :2] = torch.tensor([0.625, (first - 0.625) / fine])
    keys[32, :2] = torch.tensor([8.625, (least - 8.625) / fine])
    values, results = torch.zeros_like(case.value_pool), []
    values[case.block_table[0, 2:4].long()] = 1024
    values[case.block_table[0, 2].long(), :, :2] = 0
    for other in (0.0, 50.0):  # of head 1, in the same pair of blocks
        keys[33, 2] = other
        pool = torch.zeros_like(case.key_pool)
        pool[case.block_table[0, :16].long()] = keys.view(16, 1, 16, 64).half()
        lse = torch.zeros(1, 2)
        out = run(changed(case, query=query, key_pool=pool, value_pool=values), lse=lse)
        results.append((out[0, 0], lse[0, 0]))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (
            {"query": torch.zeros(2, 8, 64).double()},
            TypeError,
            "query is torch.float64",
        ),
        ({"query": torch.zeros(2, 64)}, ValueError, r"query is \[2, 64\]"),
        ({"query": torch.zeros(2, 7, 64).bfloat16()}, ValueError, "7 query heads"),
        ({"query": torch.zeros(2, 512, 64).bfloat16()}, ValueError, "at most 255 may share one"),
        ({"key_pool": torch.zeros(3, 2, 8, 64).bfloat16()}, ValueError, r"want \[num_blocks, num_"),
        ({"key_pool": torch.zeros(9, 2, 16, 64)}, TypeError, "key_pool is torch.float32"),
        ({"value_pool": torch.zeros(9, 1, 16, 64).bfloat16()}, ValueError, "value_pool is"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, TypeError, "seq_lens is torch.int64"),
        ({"seq_lens": torch.zeros(3, dtype=torch.int32)}, ValueError, r"seq_lens is \[3\]"),
        ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, ValueError, "cu_seqlens_q is"),
        ({"sinks": torch.zeros(8).double()}, TypeError, "sinks is torch.float64"),
        ({"scale": -0.5}, ValueError, "scale -0.5, want a finite number above 0"),
        ({"scale": float("nan")}, ValueError, "scale nan, want a finite number above 0"),
        ({"k_scale": 0.0}, ValueError, "k_scale 0.0, want a finite number above 0"),
        ({"window": 2**31}, ValueError, "window 2147483648, want 0 for none, a number of"),
        ({"window": -(2**31)}, ValueError, "window -2147483648, want 0 for none, a num"),
        ({"soft_cap": -30.0}, ValueError, "soft_cap -30.0, want 0 for none or a finite number"),
        (
            {"key_pool": torch.zeros(5, 2, 16, 65).bfloat16()[..., :64]},
            ValueError,
            "multiples of 16 bytes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes, kind, says):
    case = case_of([(20, 1), (30, 1)])
    with pytest.raises(kind, match=says):
        run(changed(case, **changes))


def test_ids_past_the_end_are_as_far_as_the_tests_say():
    case = case_of([(20, 1), (300, 1)])
    assert (case.block_table[0, 2:] == FAR).all()
    assert case.key_pool[case.block_table[0, 1].item(), :, 4:].isnan().all()
