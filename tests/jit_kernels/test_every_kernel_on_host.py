"""Run every kernel's own source on the CPU. A new kernel is covered once it is declared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from depth import at_depth

from kiln.jit_kernels.check.schedules import check_kernel, covering_variants
from kiln.jit_kernels.declare.parity import compare
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import label
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.toolchains import host

WORK = [(spec, variant) for spec in all_specs().values() for variant in covering_variants(spec)]
CASES = [pytest.param(spec, variant, id=label(spec, variant)) for spec, variant in WORK]
SEEDS = at_depth(1, 3)

pytestmark = pytest.mark.timeout(at_depth(600, 3000))  # the first test compiles for all


@pytest.fixture(scope="module", autouse=True)
def _compiled(request):
    """Compile the kernels of the selected tests of this file in advance, on all cores."""
    tests = {
        test_checked_form_finds_nothing_and_is_within_tolerance: True,
        test_plain_form_is_within_tolerance: False,
    }
    for test, checked in tests.items():
        calls = [
            item.callspec.params
            for item in request.session.items
            if getattr(item, "function", None) is test
        ]
        work = [(call["spec"], call["variant"]) for call in calls]
        host.prepare(work, checked=checked, env=settings())


@pytest.mark.quick(13)  # every tenth
@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_checked_form_finds_nothing_and_is_within_tolerance(spec, variant):
    cases = []
    findings = check_kernel(
        spec, seeds=SEEDS, env=settings(), variants=[variant], on_case=cases.append
    )
    assert not findings
    assert len(cases) == len(spec.sizes)


@pytest.mark.quick(4)
@pytest.mark.parametrize(("spec", "variant"), CASES)
def test_plain_form_is_within_tolerance(spec, variant):
    kernel = host.load(spec, variant, checked=False, env=settings())
    for sizes in spec.sizes:
        parity = compare(spec, variant, sizes, lambda a: host.launch(kernel, spec, a))
        assert parity.holds, sizes


PUBLIC = """
import torch
from kiln.jit_kernels.ops.norm.functions import rms_norm
from kiln.jit_kernels.toolchains import host
seen = []
run = host.run
host.run = lambda spec, *args, **options: (seen.append((spec.name, options["checked"])),
                                           run(spec, *args, **options))
x, weight = torch.randn(2, 3, 70), torch.randn(70)
got = rms_norm(x, weight, 1e-6)
want = torch.nn.functional.rms_norm(x, (70,), weight, 1e-6)
assert torch.allclose(got, want, rtol=1e-5, atol=1e-5)
print(seen)
"""


@pytest.mark.deep  # test_implementations.py does it in one process
@pytest.mark.parametrize(
    ("mode", "seen"),
    [("host", [("rms_norm", False)]), ("host-check", [("rms_norm", True)]), ("torch", [])],
)
def test_the_toggle_decides_what_public_functions_run_on_a_cpu(mode, seen):
    root = Path(__file__).resolve().parents[2]
    environ = {
        **os.environ,
        "KILN_CPU_KERNELS": mode,
        "PYTHONPATH": str(root / "tools/import_root"),
    }
    answer = subprocess.run(
        [sys.executable, "-c", PUBLIC], env=environ, capture_output=True, text=True, timeout=120
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == str(seen)
