"""``kiln bench kernels``: on a CPU a test of itself alone, never taken for a GPU's numbers."""

from __future__ import annotations

import json

import pytest
import torch
from depth import at_depth

from kiln.engine.bench import kernels
from kiln.engine.bench.report import Report

ROW = {
    "kernel": "rms_norm", "family": "norm", "variant": {}, "sizes": {"rows": 1},
    "implementation": "jit", "status": "measured", "median_us": 2.0, "spread_us": 0.1,
    "captured": True, "cold": True, "bytes": 1000, "flops": 2000, "bound": "memory",
    "gb_s": 0.5, "tflop_s": 0.001, "share_of_floor": 0.1, "times_ours": 1.0,
}  # fmt: skip
ROOFS = {"copy_bytes_s": 4e12, "matmul_flops_s": 8e14, "launch_us": 1.2, "l2_bytes": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it measures")
def test_without_a_gpu_it_says_so_and_measures_nothing(kiln):
    result = kiln("bench", "kernels", "norm")
    assert result.returncode == 1
    assert "no GPU found" in result.stderr
    assert "--cpu" in result.stderr
    assert result.stdout == ""


def test_on_a_cpu_it_is_labelled_a_smoke_test_in_all_that_it_leaves(kiln, tmp_path):
    numbers = tmp_path / "numbers.json"
    flags = ("--cpu", "--peers", *at_depth(("--no-compile",), ()))
    result = kiln("bench", "kernels", "norm", *flags, "--json", numbers, "--output", tmp_path)
    assert result.returncode == 0, result.stderr
    assert "CPU SMOKE TEST" in result.stdout
    report = json.loads(numbers.read_text())
    assert report["device"] == "cpu"
    assert "says nothing" in report["remark"] or "say nothing" in report["remark"]
    assert {row["family"] for row in report["rows"]} == {"norm"}
    assert {row["status"] for row in report["rows"]} == {"measured"}
    assert {"hardware", "versions", "command", "date", "ceilings"} <= set(report)
    written = {path.name for path in tmp_path.iterdir()} - {"numbers.json"}
    assert len(written) == 3
    assert all("cpu-smoke-test" in name for name in written)
    assert "CPU SMOKE TEST" in (tmp_path / "kernels-cpu-smoke-test.md").read_text()


def test_a_family_that_does_not_exist_is_named_with_those_that_do(kiln):
    result = kiln("bench", "kernels", "nrom", "--cpu")
    assert result.returncode == 1
    assert "'nrom'" in result.stderr
    assert "rotary" in result.stderr


def test_there_is_a_picture_for_each_family_that_has_numbers(tmp_path):
    none = ROW | {"family": "empty", "status": "not installed"}
    rows = [ROW, ROW | {"family": "kv", "kernel": "copy", "flops": 0}, none]
    report = Report("kernels", "c", rows, details={"device": "cuda", "ceilings": ROOFS})
    names = {path.name for path in kernels.write(report, tmp_path)}
    assert names == {"kernels.json", "kernels.md", "roofline-norm.png", "roofline-kv.png"}
    assert all((tmp_path / name).stat().st_size for name in names)
