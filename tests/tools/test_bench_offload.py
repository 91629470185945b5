"""The benchmark of the host tier runs, and its second turns come from host memory."""

from __future__ import annotations

import json
import sys

import bench_offload

from kiln.engine.cli.options import DEMO_FOLDER
from kiln.engine.kv.pool import KVShape
from kiln.engine.models.registry import read_model
from kiln.engine.runner.device import resolve_device, resolve_dtype


def test_second_turns_come_from_host_memory(tmp_path, monkeypatch):
    _, model = read_model(DEMO_FOLDER)
    dtype = resolve_dtype("auto", model.dtype, resolve_device("cpu"))
    pool = 24 * 16 * KVShape(model.attention, dtype).bytes_per_token / 2**30
    arguments = {
        "model": DEMO_FOLDER, "device": "cpu", "pool-gib": pool, "host-gib": 10 * pool,
        "conversations": 4, "tokens": 160, "rows": 1, "context": 16, "steps": 5,
        "output": tmp_path,
    }  # fmt: skip
    words = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["bench_offload.py", *words])
    bench_offload.main()
    record = json.loads((tmp_path / "kv_offload.json").read_text())
    assert {"benchmark", "hardware", "versions", "command", "date"} <= record.keys()
    [row] = record["rows"]
    # All of them but the ends of answers, which may be evicted before they are stored.
    assert row["cached_tokens"] >= 144
    assert row["loaded_blocks"] >= 4 * 8
    assert row["times_faster"] > 0
    assert row["quiet_step_ms"] > 0
