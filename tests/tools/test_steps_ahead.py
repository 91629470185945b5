"""The section steps_ahead of gpu_check, on a CPU and with a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

from depth import at_depth

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from gpu import steps_ahead
from gpu.sections import SECTIONS

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def test_each_change_is_timed_and_no_step_waits(tmp_path, monkeypatch):
    assert SECTIONS["steps_ahead"].function == "steps_ahead"
    monkeypatch.setattr(steps_ahead, "_REQUESTS", at_depth(3, 16))
    monkeypatch.setattr(steps_ahead, "_PROMPT", 8)
    monkeypatch.setattr(steps_ahead, "_STEPS", at_depth(8, 40))
    core = steps_ahead.engine(tmp_path, SHAPE, "cpu")
    rows = [steps_ahead.row_of(core, *case) for case in steps_ahead.cases()]
    core.close()
    assert len(rows) == 7
    assert [row["changing"] for row in rows[:3]] == [0, 1, at_depth(3, 16)]
    assert all(row["ok"] and row["ms"] > 0 for row in rows), rows
