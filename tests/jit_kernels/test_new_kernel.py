"""A new kernel needs two new files, its faults, and no edit for tests, toggle and warm-up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from depth import at_depth

ROOT = Path(__file__).resolve().parents[2]
NAME = "trial_scale"
TELL = """
import json, os, torch
from kiln.engine.cli.main import main
from kiln.jit_kernels import implementations
from kiln.jit_kernels.ops.NAME import NAME
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.registry import has_triton

main(["warmup", "--arch", "sm_80", "--dry-run"])
x, right, ran = torch.randn(100), [], []

def run_it():
    right.append(torch.equal(NAME(x, 2.0), x * 2))
    ran.append(implementations.decision(find_spec("NAME"), {"scalar_t": "float"}, x.device))

run_it()
os.environ["KILN_" + "NAME".upper()] = "torch"
settings.cache_clear()
implementations._decided.clear()
run_it()
print(json.dumps({
    "toggle": settings().kernel_choice("NAME"),
    "triton": has_triton("NAME"),
    "right": right,
    "implementations": [one.implementation for one in ran],
}))
"""


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
    chosen = at_depth(f"{NAME} and not fp16 and not bf16 and not torch_compile", NAME)
    out = run(
        checkout, "-m", "pytest", "-k", chosen, "-p", "no:cacheprovider",
        "tests/jit_kernels/test_every_kernel.py",
        "tests/jit_kernels/test_every_kernel_on_host.py",
        "tests/jit_kernels/test_launch.py",
        "tests/jit_kernels/test_faults.py",
    )  # fmt: skip
    passed = int(out.rsplit(" passed", 1)[0].split()[-1])
    variants = at_depth(1, 3)
    # Every target, then headers, declaration, reference, host.
    assert passed >= variants * 7 + variants * 3


@pytest.fixture(scope="module")
def told(checkout):
    """What a process that has the new kernel says about it."""
    out = run(checkout, "-c", TELL.replace("NAME", NAME), KILN_CPU_KERNELS="host-check")
    *listed, last = out.splitlines()
    return {"warm-up": listed, **json.loads(last)}


def test_its_toggle_appears(told):
    assert told["toggle"] == "torch"


def test_it_has_no_triton_form(told):
    assert not told["triton"]


def test_warm_up_builds_it(told):
    assert sum(line.startswith(NAME) for line in told["warm-up"]) == 3


def test_it_runs_as_a_torch_op(told):
    assert told["implementations"] == ["host-check", "torch"]
    assert told["right"] == [True, True]


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
