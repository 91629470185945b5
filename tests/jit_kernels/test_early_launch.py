"""Kernels that may be launched before the one ahead of them has ended: all of Kiln's."""

from __future__ import annotations

import pytest
import torch

from kiln.jit_kernels.errors import HostFault
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import HOST_GPU
from kiln.jit_kernels.template import Unit, opening, read_source, render
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.host_world import World

SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs().values()]
WAITS = ("kiln::pdl_wait_then_trigger();", "kiln::pdl_wait();", "kiln::pdl_writes_plan();")


def a_case(spec):
    """Return a small call that launches something: its variant, sizes and arguments."""
    torch.manual_seed(0)
    variant = next(spec.variants(spec.bench_needs))
    for sizes in spec.sizes:
        inputs = spec.make_inputs(variant, sizes, "cpu")
        bound = spec.bind(*inputs)
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        if 0 not in geometry.grid and all(t.numel() for t in inputs if isinstance(t, torch.Tensor)):
            return bound, geometry
    raise AssertionError(f"{spec.name} has no case that launches a block")


def run_twice(kernel, bound, geometry, seed):
    """Run a kernel and, launched early, itself: each writes what the other reads or writes."""
    world = World(checked=True, seed=seed)
    for early in (False, True):
        world.enqueue(0, kernel, geometry, bound.values, overlaps=early)
    world.run()


@pytest.mark.parametrize("spec", SPECS)
def test_every_kernel_waits_before_it_touches_anything(spec):
    assert opening(spec.source)
    bound, geometry = a_case(spec)
    kernel = host.load(spec, bound.variant, checked=True, env=settings())
    run_twice(kernel, bound, geometry, seed=1)


@pytest.mark.parametrize("name", ["apply_rotary", "copy_blocks"])
def test_a_kernel_that_does_not_wait_races_with_the_one_ahead(name):
    spec = all_specs()[name]
    bound, geometry = a_case(spec)
    unit = render(spec, bound.variant)
    text = unit.text
    for wait in WAITS:
        text = text.replace(wait, "")
    assert text != unit.text
    kernel = host.build(
        Unit(unit.name, text, unit.headers), spec.entry, spec.arguments, name="no wait",
        checked=True, env=settings(),
    )  # fmt: skip
    with pytest.raises(HostFault, match="data race on global memory"):
        run_twice(kernel, bound, geometry, seed=1)


def plan_and_attend(seed, *, between=(), early=True):
    """Launch attention's plan and attention, which reads of the plan before it waits."""
    plan, attention = all_specs()["attention_plan"], all_specs()["paged_attention"]
    torch.manual_seed(seed)
    sizes = next(s for s in attention.sizes if s["batch"] == 4)
    variant = next(attention.variants(attention.bench_needs))
    inputs = list(attention.make_inputs(variant, sizes, "cpu"))
    numbers = (sizes["group"], sizes.get("window", 0), *plan.make_inputs({}, sizes, "cpu")[6:])
    inputs[8] = torch.zeros_like(inputs[8])
    values = {plan: (inputs[8], *inputs[5:8], *numbers), attention: inputs}
    world = World(checked=True, seed=seed)
    for spec in (plan, *between, attention):
        if spec in between:
            bound, geometry = a_case(spec)
        else:
            bound = spec.bind(*values[spec])
            geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        kernel = host.load(spec, bound.variant, checked=True, env=settings())
        overlaps = early or spec is not attention
        world.enqueue(0, kernel, geometry, bound.values, overlaps=overlaps)
    world.run()
    return attention.error(inputs, attention.reference(*inputs))


@pytest.mark.parametrize("seed", range(2))
def test_attention_reads_its_plan_before_it_waits(seed):
    allowed, between = all_specs()["paged_attention"].tolerance, (all_specs()["apply_rotary"],)
    assert plan_and_attend(seed, early=False) <= allowed
    assert plan_and_attend(seed, between=between) <= allowed
    with pytest.raises(HostFault, match="data race on global memory"):
        plan_and_attend(seed)


def store_and_attend(seed, change=("", "")):
    """Launch what stores a step's keys and values and, early, attention to these and to older ones.

    ``change``: of a header of attention. Return the error of attention's output.
    """
    store, attention = all_specs()["rope_store"], all_specs()["paged_attention"]
    torch.manual_seed(seed)
    requests = 4  # of which the last blocks have not all: these fetch little before they wait
    sizes = {
        "requests": requests,
        "context": 704,
        "kv_heads": 2,
        "group": 2,
        "most": 8,
        "split": 64,
    }
    variant = next(attention.variants({**attention.bench_needs, "head_tile": "64"}))
    inputs = list(attention.make_inputs(variant, sizes, "cpu"))
    pools, place = inputs[3:5], inputs[6].long() - 1
    blocks = inputs[5].gather(1, (place // 16).unsqueeze(1)).squeeze(1)
    query, key, value = torch.randn(requests, 8, 64).bfloat16().split((4, 2, 2), dim=1)
    positions, table = torch.arange(requests), torch.rand(requests, 64)
    stored = (torch.empty_like(query), *pools, query, key, value, positions, table)
    stored += (blocks * 16 + place % 16, None, None, 1e-6, 1.0, 1.0)
    world = World(checked=True, seed=seed)
    for spec, bound in ((store, store.bind(*stored)), (attention, attention.bind(*inputs))):
        unit = render(spec, bound.variant)
        headers = {name: text.replace(*change) for name, text in unit.headers.items()}
        kernel = host.build(
            Unit(unit.name, unit.text, headers), spec.entry, spec.arguments, name="stored",
            checked=True, env=settings(),
        )  # fmt: skip
        geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
        world.enqueue(0, kernel, geometry, bound.values, overlaps=True)
    world.run()
    return attention.error(inputs, attention.reference(*inputs))


@pytest.mark.parametrize("seed", range(2))
def test_attention_reads_what_is_older_than_the_step_before_it_waits(seed):
    assert store_and_attend(seed) <= all_specs()["paged_attention"].tolerance
    too_much = ("num_keys - item.num_tokens())", "num_keys)")
    with pytest.raises(HostFault, match="data race on global memory"):
        store_and_attend(seed, too_much)


def test_what_allows_an_early_launch_is_read_in_the_source():
    names = {name: opening(spec.source) for name, spec in all_specs().items()}
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
        monkeypatch.setattr("kiln.jit_kernels.template.read_source", lambda path, text=text: text)
        assert opening.__wrapped__("any.cu") == wanted
