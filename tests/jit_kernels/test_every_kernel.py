"""Properties of every kernel. A new kernel is covered once it is declared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from depth import at_depth

from kiln.jit_kernels.compile.warmup import Job, jobs_for
from kiln.jit_kernels.declare.arch import ALL_ARCHS, compute_capability
from kiln.jit_kernels.declare.parameters import Role
from kiln.jit_kernels.declare.parity import error_of, expected
from kiln.jit_kernels.declare.spec import HOST_GPU, label
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.cubin import resources_of
from kiln.jit_kernels.toolchains.template import render

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "kernel_sources"
SPECS = [pytest.param(spec, id=spec.name) for spec in all_specs().values()]
VARIANTS = [(spec, variant) for spec in all_specs().values() for variant in spec.variants()]
CASES = [pytest.param(spec, variant, id=label(spec, variant)) for spec, variant in VARIANTS]


JOBS = [job for arch in ALL_ARCHS for job in jobs_for(all_specs().values(), [arch])]
BUILDS = [
    pytest.param(job.spec, job.variant, job.arch, id=job.name.replace(" ", "-")) for job in JOBS
]
ON_RECORD = json.loads((ROOT / "benchmarks/compile.json").read_text())
SAME_COMPILER = ON_RECORD["versions"]["nvidia-cuda-nvrtc"].startswith(nvrtc.version())


def seconds_on_record(job):
    """The program's time in the record, or the limit if it has no record."""
    row = ON_RECORD["programs"].get(job.name)
    return row["cpu_seconds"] if row and SAME_COMPILER else job.spec.max_cpu_seconds


@pytest.mark.quick(10)  # each target; below, two of three kernels
@pytest.mark.parametrize(("spec", "variant", "arch"), BUILDS)
def test_compiles_for_every_target_as_fast_as_on_record(spec, variant, arch, everything):
    job = Job(spec, variant, arch)
    compiled = everything[job]
    assert compiled.built.cubin.startswith(b"\x7fELF")
    # In units of a fixed program's compile time, which machine and load affect in the same way.
    bound = 1.8 * seconds_on_record(job) / ON_RECORD["yardstick_seconds"]
    assert compiled.cost <= bound or everything.cost_again(job) <= bound


@pytest.mark.quick(10)
@pytest.mark.parametrize(("spec", "variant", "arch"), BUILDS)
def test_compiled_within_its_bound_on_the_machine_of_the_record(spec, variant, arch, everything):
    job = Job(spec, variant, arch)
    row = ON_RECORD["programs"].get(job.name)
    if row is None:
        pytest.skip("not timed yet: python tools/bench_compile.py")
    assert row["cpu_seconds"] <= spec.max_cpu_seconds
    if SAME_COMPILER:
        grown = len(everything[job].built.cubin) / row["cubin_bytes"]
        assert grown <= 1.1, "its time no longer counts: python tools/bench_compile.py"


@pytest.mark.quick(20)
@pytest.mark.parametrize("spec", SPECS)
def test_the_variant_that_most_models_run_keeps_to_its_registers(spec, everything):
    variant = next(spec.variants(spec.bench_needs))
    archs = [arch for arch in ALL_ARCHS if compute_capability(arch) >= 80]
    archs = at_depth(["sm_80", "sm_90a"], archs)
    jobs = [job for job in jobs_for([spec], archs) if job.variant == variant]
    assert jobs
    for job in at_depth(jobs[-1:], jobs):  # for the newest target
        resources = resources_of(everything[job].built.cubin)[spec.entry]
        assert resources.spills == 0, (job.arch, resources)


@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_uses_no_header_but_our_own(spec, variant):
    unit = render(spec, variant)
    assert unit.headers
    assert all(name.startswith(("kiln/", f"{spec.family}/")) for name in unit.headers)
    everything = "".join([unit.text, *unit.headers.values()])
    assert not re.search(r"#\s*include\s*<", everything)


@pytest.mark.quick(18)
@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_declaration_is_coherent(spec, variant):
    for sizes in [*spec.sizes, *spec.bench_sizes[:2]]:
        a = spec.make_arguments(variant, sizes, "cpu")
        bound = spec.bind(a)
        assert list(bound.variant.items()) == list(variant.items())
        assert {key: sizes[key] for key in bound.sizes} == dict(bound.sizes)
        assert bound.derived.keys() == set(spec.parameters.derived)
        for one, value in zip(spec.parameters.passed, spec.kernel_values(a, bound), strict=True):
            absent = value is None and one.role is Role.OPTIONAL
            assert absent or type(value) is _TYPES[one.type], one
        geometry = spec.geometry(variant, bound.sizes, HOST_GPU)
        assert geometry.shared_bytes <= max(spec.shared_bytes(variant, HOST_GPU), 48 * 1024)
        threads = geometry.block[0] * geometry.block[1] * geometry.block[2]
        assert 1 <= threads <= 1024
        assert max(geometry.grid[1:]) < 65536
        _check_cost(spec, variant, sizes, a)


_TYPES = {"pointer": torch.Tensor, "int64": int, "int32": int, "float": float, "bool": bool}
_PART = re.compile("table|pool|items")  # a call accesses only a part of these


def _check_cost(spec, variant, sizes, a):
    """A cost below the bytes that its tensors hold would flatter the roofline."""
    times = {Role.INPUT: 1, Role.OPTIONAL: 1, Role.OUTPUT: 1, Role.IN_OUT: 2}
    moved = sum(
        times[one.role] * getattr(a, one.name).nbytes
        for one in spec.parameters.listed
        if one.role in times and getattr(a, one.name) is not None and not _PART.search(one.name)
    )
    rest = sizes.get("rest", 0)  # dimensions that the kernel does not access
    assert rest or spec.cost(variant, sizes).bytes >= moved


@pytest.mark.quick(18)
@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_reference_agrees_with_itself_in_float64(spec, variant):
    for sizes in spec.sizes:
        a = spec.make_arguments(variant, sizes, "cpu")
        got, want = spec.reference(a), expected(spec, a)
        assert got.keys() == want.keys() == set(spec.parameters.results)
        for name, value in got.items():
            assert value.dtype == getattr(a, name).dtype
            getattr(a, name).copy_(value)
        assert error_of(spec, variant, a, want).holds


@pytest.mark.quick(8)
@pytest.mark.parametrize("spec", SPECS)
def test_operator_is_well_formed_for_torch_compile(spec):
    variant = next(iter(spec.variants()))
    arguments = spec.make_arguments(variant, spec.sizes[2], "cpu")
    operator = getattr(torch.ops.kiln, spec.name).default
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, tuple(arguments), test_utils=checks)


@pytest.mark.parametrize("spec", SPECS)
def test_describes_itself(spec):
    assert spec.paper
    assert spec.parameters.results
    first, second, *_ = (SOURCES / spec.source).read_text().splitlines()
    assert first.startswith("// ")
    assert second.startswith("//")


def test_every_template_has_a_spec():
    used = {spec.source for spec in all_specs().values()}
    have = {str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.cu")}
    assert used == have


def test_only_the_headers_in_the_ptx_folder_use_assembly_or_compiler_switches():
    for path in [*SOURCES.rglob("*.cu"), *SOURCES.rglob("*.cuh")]:
        if path.parent.name == "ptx":
            continue
        text = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"\b(asm|volatile)\b|#\s*ifdef|__CUDA|KILN_ON_GPU", text), path
