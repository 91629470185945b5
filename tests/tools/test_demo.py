"""The demo model answers held-out questions over HTTP; its size and split are as documented."""

from __future__ import annotations

import json
import random
from pathlib import Path

import eval_demo
from demo_tasks import TASKS, held_out, training_pair
from depth import at_depth
from safetensors import safe_open

from kiln.engine.cli.local_server import local_server

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "engine" / "demo"


def test_it_answers_held_out_questions_over_http():
    count = at_depth(60, 200)
    with local_server(["--kv-memory-gib", "0.1"], timeout=60) as (url, _):
        assert eval_demo.main(["--url", url, "--count", str(count), "--minimum", "95"]) == 0


def test_it_is_a_small_qwen3():
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= 12e6
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    with safe_open(DEMO / "model.safetensors", framework="pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    count = sum(a * b for a, b in ([*size, 1][:2] for size in sizes))
    assert 2e6 <= count <= 6e6


def test_held_out_questions_are_never_trained_on():
    rng = random.Random(5)
    trained = {training_pair(rng).question for _ in range(30_000)}
    asked = [pair for pair in held_out(400, seed=9) if pair.task != "chat"]
    assert {pair.task for pair in asked} == set(TASKS) - {"chat"}
    assert not trained & {pair.question for pair in asked}
