"""Programmatic dependent launch: every kernel may start before the previous one has ended."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.declare.errors import HostFault
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU
from kiln.jit_kernels.launchers.cuda_python import CudaPythonLauncher
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import host, template
from kiln.jit_kernels.toolchains.host_world import World
from kiln.jit_kernels.toolchains.template import Unit, early_launch_hint, read_source, render

SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs().values()]
WAITS = ("kiln::pdl_wait_then_trigger();", "kiln::pdl_wait();", "kiln::pdl_writes_plan();")


def a_case(spec):
    """Return the arguments of a small call that launches something."""
    torch.manual_seed(0)
    variant = next(spec.variants(spec.bench_needs))
    for sizes in spec.sizes:
        a = spec.make_arguments(variant, sizes, "cpu")
        bound = spec.bind(a)
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        if 0 not in geometry.grid and all(t.numel() for t in a if isinstance(t, torch.Tensor)):
            return a
    raise AssertionError(f"{spec.name} has no case that launches a block")


def enqueue(world, spec, a, kernel=None, *, overlaps=True):
    """Queue a call of a spec's kernel or of another form of it."""
    bound = spec.bind(a)
    kernel = kernel or host.load(spec, bound.variant, checked=True, env=settings())
    geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
    world.enqueue(0, kernel, geometry, spec.kernel_values(a, bound), overlaps=overlaps)


def run_twice(spec, a, kernel=None):
    """Run a kernel twice, the second time with an early launch, on the same tensors."""
    world = World(checked=True, seed=1)
    for early in (False, True):
        enqueue(world, spec, a, kernel, overlaps=early)
    world.run()


@pytest.mark.quick(10)
@pytest.mark.parametrize("spec", SPECS)
def test_every_kernel_waits_before_it_touches_anything(spec):
    run_twice(spec, a_case(spec))


@pytest.mark.parametrize("name", ["apply_rotary", "copy_blocks"])
def test_a_kernel_that_does_not_wait_races_with_the_one_ahead(name):
    spec = all_specs()[name]
    a = a_case(spec)
    unit = render(spec, spec.bind(a).variant)
    text = unit.text
    for wait in WAITS:
        text = text.replace(wait, "")
    assert text != unit.text
    kernel = host.build(
        Unit(unit.name, text, unit.headers), spec.entry, spec.c_types, name="no wait",
        checked=True, env=settings(),
    )  # fmt: skip
    with pytest.raises(HostFault, match="data race on global memory"):
        run_twice(spec, a, kernel)


def plan_and_attend(seed, *, between=(), early=True):
    """Launch attention's plan, then attention, which reads the plan before it waits."""
    plan, attention = all_specs()["attention_plan"], all_specs()["paged_attention"]
    torch.manual_seed(seed)
    sizes = next(s for s in attention.sizes if s["batch"] == 4)
    variant = next(attention.variants(attention.bench_needs))
    named = attention.make_inputs(variant, sizes, "cpu")
    named["items"].zero_()
    rule = plan.make_inputs({}, sizes, "cpu")
    step = {name: named.get(name, rule[name]) for name in plan.parameters.names}
    calls = {plan: step, attention: named}
    world = World(checked=True, seed=seed)
    for spec in (plan, *between, attention):
        a = a_case(spec) if spec in between else spec.parameters.Arguments(**calls[spec])
        enqueue(world, spec, a, overlaps=early or spec is not attention)
    world.run()
    return attention.error(a, attention.reference(a))


@pytest.mark.parametrize("seed", range(at_depth(1, 2)))
def test_attention_reads_its_plan_before_it_waits(seed):
    allowed, between = all_specs()["paged_attention"].tolerance, (all_specs()["apply_rotary"],)
    assert plan_and_attend(seed, early=False) <= allowed
    assert plan_and_attend(seed, between=between) <= allowed
    with pytest.raises(HostFault, match="data race on global memory"):
        plan_and_attend(seed)


def attention_starts_early(plan_in_graph, attention_in_graph, *, hear=True):
    """Whether the launcher starts attention early behind a plan across a graph's edge.

    Kernels of a graph are launched on a capture stream, 2, and run when it is replayed on 1.
    """
    driver = MagicMock()
    driver.cuModuleLoadData.return_value = driver.cuModuleGetFunction.return_value = (0, 0)
    driver.cuCtxGetCurrent.return_value = (0, 0)
    launcher, early = CudaPythonLauncher(driver), False
    functions = {
        name: launcher.load(name, b"", "", early_hint=early_launch_hint(all_specs()[name].source))
        for name in ("attention_plan", "paged_attention")
    }
    edge = launcher.at_graph_edge if hear else lambda stream: None
    for name, in_graph in (
        ("attention_plan", plan_in_graph),
        ("paged_attention", attention_in_graph),
    ):
        if in_graph:
            edge(2)
            early = functions[name].may_start_early(2)
            edge(2)
            edge(1)
        else:
            early = functions[name].may_start_early(1)
    return early


@pytest.mark.quick(2)
@pytest.mark.parametrize("graph", [(True, False), (False, True), (True, True), (False, False)])
def test_attention_waits_for_a_plan_on_the_other_side_of_a_graphs_edge(graph):
    """As if the edge were no barrier: nothing documents that it is one."""
    allowed = all_specs()["paged_attention"].tolerance
    assert plan_and_attend(0, early=attention_starts_early(*graph)) <= allowed
    if graph[0] is not graph[1]:
        with pytest.raises(HostFault, match="data race on global memory"):
            plan_and_attend(0, early=attention_starts_early(*graph, hear=False))


def store_and_attend(seed, change=("", "")):
    """Store a step's keys and values, then launch attention to these and older ones early.

    ``change``: to a header of attention. Return the error of attention's output.
    """
    store, attention = all_specs()["rope_store"], all_specs()["paged_attention"]
    torch.manual_seed(seed)
    requests = 4  # the last blocks do not have all: they fetch little before they wait
    sizes = {
        "requests": requests,
        "context": 704,
        "kv_heads": 2,
        "group": 2,
        "most": 8,
        "split": 64,
    }
    variant = next(attention.variants({**attention.bench_needs, "head_tile": "64"}))
    a = attention.make_arguments(variant, sizes, "cpu")
    place = a.seq_lens.long() - 1
    blocks = a.block_table.gather(1, (place // 16).unsqueeze(1)).squeeze(1)
    query, key, value = torch.randn(requests, 8, 64).bfloat16().split((4, 2, 2), dim=1)
    stored = store.parameters.Arguments(
        out=torch.empty_like(query), key_pool=a.key_pool, value_pool=a.value_pool, query=query,
        key=key, value=value, positions=torch.arange(requests), query_weight=None, key_weight=None,
        cos_sin_table=torch.rand(requests, 64), slot_mapping=blocks * 16 + place % 16,
        eps=1e-6, weight_offset=0.0, round_once=False, k_scale=1.0, v_scale=1.0,
    )  # fmt: skip
    world = World(checked=True, seed=seed)
    for spec, own in ((store, stored), (attention, a)):
        unit = render(spec, spec.bind(own).variant)
        headers = {name: text.replace(*change) for name, text in unit.headers.items()}
        kernel = host.build(
            Unit(unit.name, unit.text, headers), spec.entry, spec.c_types, name="stored",
            checked=True, env=settings(),
        )  # fmt: skip
        enqueue(world, spec, own, kernel)
    world.run()
    return attention.error(a, attention.reference(a))


@pytest.mark.parametrize("seed", range(at_depth(1, 2)))
def test_attention_reads_what_is_older_than_the_step_before_it_waits(seed):
    assert store_and_attend(seed) <= all_specs()["paged_attention"].tolerance
    too_much = ("num_keys - item.num_tokens())", "num_keys)")
    with pytest.raises(HostFault, match="data race on global memory"):
        store_and_attend(seed, too_much)


def test_what_allows_an_early_launch_is_read_in_the_source():
    names = {name: early_launch_hint(spec.source) for name, spec in all_specs().items()}
    assert all(names.values()), "every kernel waits, in its first statement"
    assert names["attention_plan"] == "pdl_writes_plan"
    assert names["paged_attention"] == "pdl_reads_plan"
    assert names["rms_norm"] == "pdl_hints_first"
    assert names["apply_rotary"] == "pdl_wait_then_trigger"
    assert names["copy_blocks"] == "pdl_writes_plan", "of blocks that attention reads early"
    assert names["paged_prefill"] == "pdl_wait"


def test_a_wait_that_is_not_the_first_statement_does_not_count(tmp_path, monkeypatch):
    source = read_source(all_specs()["apply_rotary"].source)
    late = source.replace(
        "  kiln::pdl_wait_then_trigger();\n", "  int i = 0;\n  kiln::pdl_wait_then_trigger();\n"
    )
    for text, wanted in ((source, "pdl_wait_then_trigger"), (late, "")):
        monkeypatch.setattr(template, "read_source", lambda path, text=text: text)
        assert early_launch_hint.__wrapped__("any.cu") == wanted
