"""Mutation tests: planted faults in the source of every kernel, which the checks must catch.

A patch that no longer matches the source fails its test.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from depth import at_depth

from kiln.jit_kernels.check.schedules import Finding, check_kernel
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import HOST_GPU, LaunchGeometry
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.toolchains.template import Unit, render

pytestmark = pytest.mark.timeout(at_depth(600, 3000))  # the first test compiles for all


@dataclass(frozen=True)
class Fault:
    kernel: str
    name: str
    old: str
    new: str
    header: str = ""  # "": the template itself
    few_blocks: bool = False  # one block takes all rows, as on a GPU with fewer blocks than rows
    multiprocessors: int = 0  # of the simulated GPU; 0: as HOST_GPU
    needs: Mapping[str, str] = field(default_factory=lambda: {"scalar_t": "kiln::bf16"})
    seeds: int = 1  # scheduler seeds, one of which must show the fault
    sizes: Sequence[Mapping[str, int]] | None = None  # cases to run; None: all of the spec's
    # Instead of the spec's cases: (unit_of, [kernel], seed) -> what shows the fault, or None.
    scenario: Callable[[Callable[..., Unit], list[str], int], str | None] | None = None

    @property
    def id(self):
        return f"{self.kernel}-{self.name}"


# A family's faults are in faults/<family>.py, so that a new kernel adds its own: FAULTS, a list of
# arguments of Fault.
FAULTS = [
    Fault(**planted)
    for path in sorted((Path(__file__).parent / "faults").glob("*.py"))
    for planted in runpy.run_path(str(path))["FAULTS"]
]
FEW_BLOCKS = [fault for fault in reversed(FAULTS) if fault.few_blocks]


def patched(fault, spec, variant):
    unit = render(spec, variant)
    text = unit.headers[fault.header] if fault.header else unit.text
    assert fault.old in text, f"{fault.id}: nothing to replace"
    text = text.replace(fault.old, fault.new)
    if fault.header:
        return Unit(unit.name, unit.text, {**unit.headers, fault.header: text})
    return Unit(unit.name, text, unit.headers)


def planted(fault):
    """The spec to check, its variant, and a function that renders it with the fault."""
    spec = find_spec(fault.kernel)
    variant = next(spec.variants(fault.needs))
    if fault.few_blocks:

        def one_block(variant, sizes, gpu):
            whole = find_spec(fault.kernel).geometry(variant, sizes, gpu)
            return LaunchGeometry((min(whole.grid[0], 1), 1, 1), whole.block, whole.shared_bytes)

        spec = replace(spec, geometry=one_block)
    elif fault.multiprocessors:
        machine = replace(HOST_GPU, num_multiprocessors=fault.multiprocessors)

        def of_machine(variant, sizes, gpu):
            return find_spec(fault.kernel).geometry(variant, sizes, machine)

        spec = replace(spec, geometry=of_machine)
    return spec, variant, lambda spec, variant: patched(fault, spec, variant)


def check(fault, unit_of=None, first_only=False):
    spec, variant, with_fault = planted(fault)
    if fault.scenario is not None:
        for seed in range(fault.seeds):
            report = fault.scenario(unit_of or with_fault, [fault.kernel], seed)
            if report:
                return [Finding(fault.id, seed, report)]
        return []
    return check_kernel(
        spec,
        seeds=fault.seeds,
        env=settings(),
        variants=[variant],
        sizes=fault.sizes,
        unit_of=unit_of or with_fault,
        first_only=first_only,
    )


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    """Compile for the selected tests in advance, two at a time.

    Most builds run once, so they are compiled without optimization, in two thirds of the time.
    Omitting line numbers saves another seventh.
    """
    wanted = [
        item.callspec.params["fault"]
        for item in request.session.items
        if getattr(item, "function", None) is test_a_planted_fault_is_caught
    ]

    def build(fault):
        spec, variant, with_fault = planted(fault)
        unit = with_fault(spec, variant)
        host.build(unit, spec.entry, spec.c_types, name=fault.id, checked=True, env=settings())

    assert host._CHECKED[:3] == ("-Og", "-g1", "-gdwarf-4")
    unoptimized = ("-O0", *host._CHECKED[3:])
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(host, "_CHECKED", unoptimized)
        futures = [pool.submit(build, fault) for fault in wanted]
        yield
        for future in futures:
            future.cancel()


@pytest.fixture(scope="module")
def score(request):
    caught = []
    yield caught
    plugins = request.config.pluginmanager
    with plugins.get_plugin("capturemanager").global_and_fixture_disabled():
        line = f" mutation score: {sum(caught)} of {len(caught)} planted faults caught"
        plugins.get_plugin("terminalreporter").write_line(line)


@pytest.mark.quick(16)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_planted_fault_is_caught(fault, score):
    findings = check(fault, first_only=True)
    score.append(bool(findings))
    assert findings


@pytest.mark.quick(2)
@pytest.mark.parametrize("fault", FEW_BLOCKS, ids=lambda fault: fault.id)
def test_several_rows_a_block_are_fine_without_a_fault(fault):
    assert not check(fault, render)


@pytest.mark.parametrize(
    ("fault", "category"),
    [
        ("rms_norm-dropped barrier before the sums are read", "uninitialised shared memory"),
        ("rms_norm_quant-one array for sums and maxima", "data race on shared memory"),
        ("rms_norm-misaligned vectors", "misaligned access"),
        ("rms_norm-vectors past the row", "out-of-bounds"),
        ("rms_norm-dropped last chunk of the result", "wrong result: error nan"),
        ("silu_and_mul-columns written by every block", "data race on global memory"),
        ("apply_rotary-wrong sign", "wrong result"),
    ],
)
def test_a_finding_names_case_and_category(fault, category):
    fault = next(f for f in FAULTS if f.id == fault)
    finding = next(f for f in check(fault) if category in f.report)
    assert finding.case.startswith(f"{fault.kernel}[bf16")
    assert finding.seed == 0


def test_every_kernel_has_faults_planted():
    assert {fault.kernel for fault in FAULTS} == set(all_specs())
