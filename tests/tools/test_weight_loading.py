"""The rows of gpu_check about the loading of weights, on the CPU."""

from __future__ import annotations

import pytest
import torch
from gpu import weight_loading
from late_copier import PromptCopier

from kiln.engine.bench.shapes import SHAPES
from kiln.engine.models import staged_copies

CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 130,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_loading, "_SHARD", 100_000)
    monkeypatch.setattr(weight_loading, "_TIMES", 1)
    weight_loading.write_checkpoint(SHAPES["llama3-8b"] | SMALL, tmp_path, CPU)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    return tmp_path


def test_both_ways_are_timed_and_load_the_same(folder):
    rows = weight_loading.rows_of(folder, CPU, PromptCopier(), limit=0)
    found = [(row["way"], row["ranks"], row["equal"], row["ok"]) for row in rows]
    assert found == [
        ("mapped", 1, True, True), ("threads", 1, True, False),  # in more than 0 seconds
        ("mapped", 2, True, True), ("threads", 2, True, True),
    ]  # fmt: skip


def test_a_wrong_tensor_is_a_failure(folder, monkeypatch):
    works = staged_copies.read_extent

    def wrong(file, extent, out):
        works(file, extent, out)
        out[0] ^= 1

    monkeypatch.setattr(staged_copies, "read_extent", wrong)
    rows = weight_loading.rows_of(folder, CPU, PromptCopier())
    assert [row["ok"] for row in rows] == [False] * 4
