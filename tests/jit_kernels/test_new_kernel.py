"""A new kernel needs two new files, its faults, and no edit for tests, toggle and warm-up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "trial_scale"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout with a new trial kernel, written by tools/new_kernel.py."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in (
        "benchmarks",
        "cache",
        "engine",
        "jit_kernels",
        "kernel_sources",
        "tests",
        "tools",
    ):
        ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.egg-info")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    run(copy, "tools/new_kernel.py", NAME, "--root", str(copy))
    after = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    assert {path: after.get(path) for path in before} == before, "no file was edited"
    new = {str(path.relative_to(copy)) for path in after.keys() - before.keys()}
    kernel = {f"kernel_sources/{NAME}/{NAME}.cu", f"jit_kernels/ops/{NAME}.py"}
    assert new == kernel | {f"tests/jit_kernels/faults/{NAME}.py"}
    return copy


def run(checkout, *arguments, **environ):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=checkout,
        env={**os.environ, **environ, "PYTHONPATH": str(checkout / "tools/import_root")},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_its_tests_appear_and_pass(checkout):
    out = run(
        checkout, "-m", "pytest", "-k", NAME, "-p", "no:cacheprovider",
        "tests/jit_kernels/test_every_kernel.py",
        "tests/jit_kernels/test_every_kernel_on_host.py",
        "tests/jit_kernels/test_launch.py",
        "tests/jit_kernels/test_faults.py",
    )  # fmt: skip
    passed = int(out.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= 3 * 7 + 3 * 3  # every target, then headers, declaration, reference, host


def test_its_toggle_appears(checkout):
    code = "from kiln.jit_kernels.settings import settings as s; print(s().kernel_choice('NAME'))"
    environ = {f"KILN_{NAME.upper()}": "torch"}
    assert run(checkout, "-c", code.replace("NAME", NAME), **environ).strip() == "torch"


def test_it_has_no_triton_form(checkout):
    code = "from kiln.jit_kernels.triton_forms import has_triton; assert not has_triton('NAME')"
    run(checkout, "-c", code.replace("NAME", NAME))


def test_warm_up_builds_it(checkout):
    out = run(checkout, "-m", "kiln.engine.cli.main", "warmup", "--arch", "sm_80", "--dry-run")
    assert sum(line.startswith(NAME) for line in out.splitlines()) == 3


def test_it_runs_as_a_torch_op(checkout):
    code = (
        f"import torch; from kiln.jit_kernels.ops.{NAME} import {NAME} as f\n"
        "x = torch.randn(100); assert torch.equal(f(x, 2.0), x * 2)"
    )
    run(checkout, "-c", code)
    run(checkout, "-c", code, KILN_CPU_KERNELS="host-check")


def test_a_taken_name_is_refused(checkout):
    done = subprocess.run(
        [sys.executable, "tools/new_kernel.py", NAME, "--root", str(checkout)],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "exists already" in done.stderr
