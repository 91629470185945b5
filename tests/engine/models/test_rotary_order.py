"""Models whose rotary pairs are neighbours are put in order at load: queries, keys, biases, norms.

A tiny model is stored so, and answers as the model that it was made of.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny
from tiny_answers import ask, assert_agrees, draw_prompts, serve

from kiln.engine.models import registry
from kiln.engine.models.families import qwen3
from kiln.engine.models.rotary_order import halves_of_pairs

HEAD_DIM = 20


def test_the_even_dimensions_of_a_head_come_first():
    assert halves_of_pairs(2, 5, 4, 3) == (0, 2, 1, 3, 4, 5, 7, 6, 8, 9, 10, 11, 12)
    assert halves_of_pairs(0, 4, 4) == ()


@pytest.fixture
def interleaved(tmp_path, monkeypatch):
    """A folder, and what transformers computes for it once its pairs are in order."""
    from dataclasses import replace

    one = replace(all_tiny()["qwen3"], fields={"head_dim": HEAD_DIM, "attention_bias": True})
    model = one.save(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            order = halves_of_pairs(len(tensor) // HEAD_DIM, HEAD_DIM, HEAD_DIM)
            tensors[name] = torch.empty_like(tensor)
            tensors[name][list(order)] = tensor
    save_file(tensors, path)

    def traits(fields):
        return replace(qwen3.traits(fields), interleaved=True)

    changed = replace(qwen3.FAMILY, traits=traits)
    monkeypatch.setattr(
        registry, "known_families", lambda: dict.fromkeys(changed.architectures, changed)
    )

    def logits(token_ids, total):
        with torch.inference_mode():
            return one.logits(model, token_ids, total)

    return tmp_path, logits


def test_answers_are_those_of_pairs_in_halves(interleaved):
    folder, logits = interleaved
    assert_agrees(logits, ask(serve(folder), draw_prompts((3, 17)), whole=True))
