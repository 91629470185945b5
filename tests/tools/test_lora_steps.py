"""The section lora_steps of gpu_check, on a CPU and with a tiny model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from depth import at_depth

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))

from gpu import lora_steps

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 96,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    parent = tmp_path_factory.mktemp("lora-steps")
    return lora_steps.prepare(
        SHAPE, parent, "cpu", steps=at_depth(4, 8), long_prompt=800, long_run=600
    )


def test_every_kind_of_step_is_measured(setup, monkeypatch):
    few, many_adapters, prompt_tokens = at_depth((2, 3, 16), (8, 64, 128))
    monkeypatch.setattr(lora_steps, "_ADAPTERS", few)
    monkeypatch.setattr(lora_steps, "_MANY", many_adapters)
    monkeypatch.setattr(lora_steps, "_PROMPT", prompt_tokens)
    *decodes, prompt, loading, many = lora_steps.rows_of(setup, copy_bytes_s=1e9)
    assert [(row["rows"], row["adapters"]) for row in (*decodes, many)] == [
        (1, 0), (1, 1), (64, 0), (64, 1), (64, few), (64, many_adapters),
    ]  # fmt: skip
    assert all(row["ms"] > 0 for row in (*decodes, prompt, loading, many))
    assert [row.get("ok") for row in decodes] == [True, None, True, None, None]
    of_one, of_few = decodes[3]["floor_ms"], decodes[4]["floor_ms"]
    assert of_few == pytest.approx(few * of_one)
    assert decodes[2]["floor_ms"] == 0
    assert loading["loads"] == 3
    assert loading["slowest_ms"] >= loading["ms"]
    assert loading["over_quiet"] > 0


def test_the_bytes_of_a_prompt_are_counted_by_hand(setup):
    kv = 2 * 8
    outputs = 2 * (32 + 2 * kv + 32 + 2 * 48 + 32)  # of both layers: q, k, v, o, gate, up, down
    inputs = 2 * (32 + 32 + 32 + 48)  # x of qkv, of o, of gate and up, of down
    weights = 2 * 16 * (32 + 32 + 2 * (32 + kv) + 32 + 32 + 3 * (32 + 48))
    assert lora_steps._prompt_bytes(setup) == 2 * (800 * (inputs + 2 * outputs) + weights)
