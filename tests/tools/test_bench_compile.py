"""Compile times of some kernels can be taken anew; the others' stay on record."""

from __future__ import annotations

import json

import bench_compile


def test_only_the_named_kernels_are_timed_anew(tmp_path, monkeypatch, capsys):
    record = tmp_path / "compile.json"
    for kernels in (["copy_blocks", "silu_and_mul"], ["copy_blocks"]):
        arguments = ["--rounds", "1", "--output", str(tmp_path), "--kernels", *kernels]
        monkeypatch.setattr("sys.argv", ["bench_compile.py", *arguments])
        bench_compile.main()
        if kernels[-1] == "silu_and_mul":
            first = json.loads(record.read_text())
            for row in first["programs"].values():
                row["cpu_seconds"] = 99.0
            record.write_text(json.dumps(first))
    now = json.loads(record.read_text())["programs"]
    assert list(now) == list(first["programs"])
    old = {row["kernel"] for row in now.values() if row["cpu_seconds"] == 99.0}
    assert old == {"silu_and_mul"}
    assert all(row["cubin_bytes"] > 1000 for row in now.values())
    assert "| silu_and_mul | 21 | 99.000 |" in (tmp_path / "compile.md").read_text()
    assert (tmp_path / "compile.png").stat().st_size
    assert "| copy_blocks | 7 |" in capsys.readouterr().out
