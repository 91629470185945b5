"""The benchmark of prefix caching checks that no token changes, and measures what it says."""

from __future__ import annotations

import json

import bench_prefix


def test_both_engines_do_the_same_work(monkeypatch, tmp_path):
    flags = ["--requests", "3", "--shared", "64", "--repeats", "1"]
    monkeypatch.setattr("sys.argv", ["bench_prefix.py", *flags, "--output", str(tmp_path)])
    bench_prefix.main()
    record = json.loads((tmp_path / "prefix_cache.json").read_text())
    [row] = record["rows"]
    assert (row["requests"], row["shared"]) == (3, 64)
    assert min(row["off"], row["on"], *record["host"].values()) > 0
