"""The GPU script is ready before a GPU is: it runs here, and says what it could not measure."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu import greedy, report

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine would run it all")
def test_without_a_gpu_every_section_is_not_measured(tmp_path):
    command = [sys.executable, "tools/gpu_check.py", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert {s["status"] for s in result["sections"].values()} == {"not measured"}
    assert "not measured" in (tmp_path / "gpu_check.md").read_text()


def test_the_greedy_section_holds_on_a_cpu():
    rows = greedy.parity(argparse.Namespace(quick=True), device="cpu")
    assert len(rows) == 8
    assert not [row for row in rows if not row["ok"]]


def test_timings_become_a_table_and_a_plot(tmp_path):
    row = {
        "kernel": "rms_norm", "sizes": {"rows": 1}, "bytes": 1000, "jit_us": 2.0,
        "torch_us": 4.0, "compile_us": 3.0, "copy_gb_s": 4000.0,
    }  # fmt: skip
    result = {
        "command": "c",
        "machine": report.machine(),
        "sections": {"kernel_timing": {"status": "passed", "rows": [row, row], "seconds": 1}},
    }
    report.write_tables(result, tmp_path)
    assert "| rms_norm | rows=1 |" in (tmp_path / "gpu_check.md").read_text()
    assert (tmp_path / "gpu_kernels.png").stat().st_size > 1000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_holds_on_the_gpu(tmp_path):
    command = [sys.executable, "tools/gpu_check.py", "--quick", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:]
