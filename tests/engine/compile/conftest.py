"""Small models, and the environment of a start with KILN_COMPILE."""

from __future__ import annotations

import json

import pytest
import torch

from kiln.cache.env import Env
from kiln.engine.attention.context import AttentionStep, attention_step
from kiln.engine.compile.compiled_model import compiled
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model

CPU = torch.device("cpu")


@pytest.fixture
def make_model(tmp_path, small_config):
    """Return a function from an architecture to a model with random weights."""

    def make(architecture, dtype=torch.float32, seed=0, **more):
        (tmp_path / "config.json").write_text(json.dumps(small_config(architecture, **more)))
        family, config = read_model(tmp_path)
        weights = DummyWeights(seed, dtype)
        with torch.inference_mode():
            return load_model(family, config, weights, 64, dtype, CPU, lambda *told: None)

    return make


@pytest.fixture
def env(tmp_path):
    """Return a function from a mode to the environment, with a cache of this test's own."""

    def make(mode, **more):
        return Env(**{"compile": mode, "kernel_cache_dir": tmp_path / "cache", **more})

    return make


class Attention:
    """Stands in for every attention layer: mixes positions and layer in, and overwrites qkv."""

    def __init__(self, index):
        self.index = index

    def __call__(self, step, qkv, positions, out):
        width = out.shape[1]
        out.copy_(qkv[:, :width] * 2 + positions[:, None] + self.index)
        out.add_(qkv[:, width:].sum(1, keepdim=True))
        qkv.fill_(torch.nan)


@pytest.fixture
def hidden():
    """Return a function that runs the layers of a model for a number of tokens."""

    @torch.inference_mode()
    def run(model, tokens):
        ids = torch.arange(tokens) * 7 % 50
        layers = [Attention(layer.index) for layer in model.attention_layers]
        with attention_step(AttentionStep(layers, None, None)):
            return model.forward(ids, torch.arange(tokens))

    return run


@pytest.fixture
def start(env):
    """Return a function that makes a model's forward pass as a start of the engine does."""

    def make(model, mode, **more):
        told = []
        with torch.inference_mode():
            made = compiled(model, CPU, env(mode, **more), lambda *stage: told.append(stage))
        pieces = [one for one in told if one[0] == "compiled pieces"]
        assert told[-1][1] == told[-1][2] == len(pieces) - 1
        assert [one[0] for one in told].count("tracing") in (0, 2)
        return made

    return make
