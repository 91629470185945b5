"""The benchmark of speculative decoding compares the same work with and without drafts."""

from __future__ import annotations

import json

import bench_speculation


def test_a_text_that_repeats_itself_takes_fewer_steps(monkeypatch, tmp_path):
    flags = ["--model", "tiny", "--rows", "1", "2", "--tokens", "40", "--repeats", "2"]
    monkeypatch.setattr("sys.argv", ["bench_speculation.py", *flags, "--output", str(tmp_path)])
    bench_speculation.main()
    record = json.loads((tmp_path / "speculation-tiny.json").read_text())
    rows = {(row["text"], row["rows"]): row for row in record["rows"]}
    assert len(rows) == 4
    for (text, _), row in rows.items():
        steps, drafted = row["steps"], row["drafts"]["steps"]
        assert drafted <= steps / 2 if text == "repeats itself" else drafted <= steps + 2
    assert rows["repeats itself", 1]["drafts"]["accepted"] > 0.9
    assert (tmp_path / "speculation-tiny.md").read_text().startswith("# Speculative decoding")
