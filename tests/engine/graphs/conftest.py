"""Engines whose steps run through graphs on a CPU: float16, the kernels' own source, emulation."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kiln import LLM, SamplingParams

from kiln.engine.config import EngineConfig, GraphConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.runner.model_runner import ModelRunner
from kiln.jit_kernels import implementations
from kiln.jit_kernels.settings import settings

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 400,
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
def model_of(tokenizer_folders, tmp_path_factory):
    """Return a function that makes a folder with a tokenizer and the config of a tiny model."""

    def make(**changes) -> Path:
        folder = tmp_path_factory.mktemp("graphs") / "tiny"
        shutil.copytree(tokenizer_folders["byte-level"], folder)
        (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(model_of):
    return model_of()


@dataclass(frozen=True)
class Served:
    """What an engine answered, in a form that can be compared, and its counters."""

    answers: list[tuple[Any, ...]]
    stats: Any


@pytest.fixture
def serve(tiny_model, environment):
    """Return a function that starts an engine and answers prompts, each with its parameters."""

    def run(requests, *, graphs=True, folder=None, **settings) -> Served:
        sizes = {"num_kv_blocks": 64, "max_num_seqs": 5, "max_num_batched_tokens": 24}
        llm = LLM(
            str(folder or tiny_model),
            device="cpu",
            dtype="float16",
            load_format="dummy",
            disable_cuda_graph=not graphs,
            **{**sizes, **settings},
        )
        prompts = [prompt for prompt, _ in requests]
        outputs = llm.generate(prompts, [SamplingParams(**params) for _, params in requests])
        each = [output.outputs[0] for output in outputs]
        return Served(
            [(tuple(o.token_ids), o.text, o.finish_reason, str(o.logprobs)) for o in each],
            llm.core.stats(),
        )

    return run


@pytest.fixture
def requests():
    """Prompts of 1 to 45 tokens; some are answered greedily, the others at random."""
    return [
        (
            [(5 * index + 3 * place + 1) % 400 for place in range(1 + 6 * index)],
            {"temperature": index % 2, "seed": index, "max_tokens": 4 + index, "ignore_eos": True},
        )
        for index in range(8)
    ]


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
