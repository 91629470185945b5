"""The benchmark of the API process reads every stream to its end, and measures what it says."""

from __future__ import annotations

import json

import bench_api_process
import pytest


@pytest.mark.deep
def test_two_loads_differ_in_their_tokens(monkeypatch, tmp_path):
    for name, value in (("LIVE", 2), ("SILENT", 3), ("STALLED", 2), ("ROUNDS", 1)):
        monkeypatch.setattr(bench_api_process, name, value)
    flags = ["--streams", "4", "--tokens", "20", "--step-ms", "5"]
    case = "chat, reasoning and tools read"
    monkeypatch.setattr(
        "sys.argv", ["bench.py", *flags, "--cases", case, "--output", str(tmp_path)]
    )
    bench_api_process.main()
    record = json.loads((tmp_path / "api_process.json").read_text())
    [row], [gaps] = record["rows"], record["hostile"]
    assert row["case"] == case
    assert row["tokens_per_s"] > 0
    assert 0.5 < row["tokens_an_event"] <= 20
    assert gaps["quiet_p99_ms"] >= gaps["quiet_median_ms"] > 0
    assert gaps["hostile_p99_ms"] >= gaps["hostile_median_ms"] > 0
