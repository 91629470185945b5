"""Engines whose steps run through graphs on a CPU: float16, the kernels' own source, emulation."""

from __future__ import annotations

import json

import pytest

from kiln.engine.config import EngineConfig, GraphConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.runner.model_runner import ModelRunner
from kiln.jit_kernels import implementations
from kiln.jit_kernels.settings import settings

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
GRAPHS = {"KILN_CPU_KERNELS": "host", "KILN_CPU_GRAPHS": "emulate"}


@pytest.fixture
def environment(monkeypatch):
    """Return a function that sets KILN_ variables for the engines made after it."""

    def use(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(implementations, "_decided", {})
        settings.cache_clear()

    use(**GRAPHS)
    yield use
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model of two layers with random weights, which change its answer from token to token."""
    folder = tmp_path_factory.mktemp("graphs") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def make_runner(tiny_model, environment):
    """Return a function that loads the model and captures its graphs, in float16."""

    def make(
        *, capture=True, num_blocks=64, rows=4, tokens=32, max_model_len=64, **graphs
    ) -> ModelRunner:
        model = ModelConfig(
            str(tiny_model), "float16", "cpu", load_format="dummy", max_model_len=max_model_len
        )
        config = EngineConfig(
            model,
            KVConfig(num_blocks=num_blocks),
            SchedulerConfig(rows, tokens, overlap=False),
            GraphConfig(**graphs),
        )
        runner = ModelRunner(config)
        runner.try_out()
        if capture:
            runner.capture_graphs()
        return runner

    return make
