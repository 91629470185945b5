"""Compile times of some kernels can be updated; the record keeps the others."""

from __future__ import annotations

import json

import bench_compile
import pytest
from depth import at_depth

from kiln.jit_kernels.declare.arch import ALL_ARCHS

ARCHS = at_depth(ALL_ARCHS[:2], ALL_ARCHS)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(bench_compile, "ROUNDS", 1)
    monkeypatch.setattr(bench_compile, "ALL_ARCHS", ARCHS)
    monkeypatch.setattr("sys.argv", ["bench_compile.py", *arguments])
    bench_compile.main()


def test_only_the_named_kernels_are_timed_anew(tmp_path, monkeypatch, capsys):
    record = tmp_path / "compile.json"
    for kernels in (["copy_blocks", "silu_and_mul"], ["copy_blocks"]):
        run(monkeypatch, "--output", str(tmp_path), "--kernels", *kernels)
        if kernels[-1] == "silu_and_mul":
            first = json.loads(record.read_text())
            for row in first["programs"].values():
                row["cpu_seconds"] = 99.0
            first["yardstick_seconds"] = 1e-3  # measured when the machine was less busy
            record.write_text(json.dumps(first))
    assert json.loads(record.read_text())["yardstick_seconds"] == 1e-3
    now = json.loads(record.read_text())["programs"]
    assert list(now) == list(first["programs"])
    old = {row["kernel"] for row in now.values() if row["cpu_seconds"] == 99.0}
    assert old == {"silu_and_mul"}
    assert all(row["cubin_bytes"] > 1000 for row in now.values())
    assert f"| silu_and_mul | {3 * len(ARCHS)} | 99.000 |" in (tmp_path / "compile.md").read_text()
    assert (tmp_path / "compile.png").stat().st_size
    assert f"| copy_blocks | {len(ARCHS)} |" in capsys.readouterr().out


def test_a_record_of_another_machine_is_not_added_to(tmp_path, monkeypatch, capsys):
    record = tmp_path / "compile.json"
    run(monkeypatch, "--output", str(tmp_path), "--kernels", "copy_blocks")
    other = json.loads(record.read_text())
    other["hardware"]["cores"] += 1
    other["versions"]["kiln"] = "another"
    record.write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--output", str(tmp_path), "--kernels", "copy_blocks")
    assert "compile.json is from another machine (cores differ)" in capsys.readouterr().err
    assert json.loads(record.read_text()) == other


def test_a_kernel_that_is_not_there_is_refused_by_name(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--output", str(tmp_path), "--kernels", "copy_block")
    assert "no kernel is named copy_block" in capsys.readouterr().err
