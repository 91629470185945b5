"""Engines whose steps run through graphs on a CPU: float16, the kernels' own source, emulation."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from depth import at_depth

from kiln import LLM, SamplingParams
from kiln.engine.config import (
    EngineConfig,
    GraphConfig,
    KVConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from kiln.engine.runner.model_runner import ModelRunner

TINY = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
TOKENS = at_depth(8, 32)  # of the largest step: fewer make fewer graphs
GRAPHS = {"KILN_CPU_KERNELS": "host", "KILN_CPU_GRAPHS": "emulate"}


@pytest.fixture
def environment(environment):
    """The same function; until it is called, graphs are emulated on the kernels' own source."""
    environment(**GRAPHS)
    return environment


@pytest.fixture(scope="session")
def model_of(tokenizer_folders, tmp_path_factory):
    """Return a function that makes a tiny model of a family, with a tokenizer.

    Its weights are so large that each token depends on all before it.
    """

    def make(family="Qwen3", **changes) -> Path:
        import transformers

        torch.manual_seed(11)
        config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
        folder = tmp_path_factory.mktemp("graphs") / "tiny"
        shutil.copytree(tokenizer_folders["byte-level"], folder)
        model.half().save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_model(model_of):
    return model_of()


@dataclass(frozen=True)
class Served:
    """What an engine answered, in a form that can be compared, and its counters."""

    answers: list[tuple[Any, ...]]  # tokens, text, and why each ended
    logprobs: list[float]
    stats: Any


@pytest.fixture
def serve(tiny_model, environment):
    """Return a function that starts an engine and answers prompts, each with its parameters."""

    def run(requests, *, graphs=True, folder=None, **settings) -> Served:
        sizes = {"num_kv_blocks": 64, "max_num_seqs": 5, "max_num_batched_tokens": 40}
        llm = LLM(
            str(folder or tiny_model),
            device="cpu",
            disable_cuda_graph=not graphs,
            enable_cudagraph_gc=True,  # no collection of the tests' many objects before a capture
            **{"dtype": "float16", **sizes, **settings},
        )
        prompts = [prompt for prompt, _ in requests]
        outputs = llm.generate(prompts, [SamplingParams(**params) for _, params in requests])
        each = [output.outputs[0] for output in outputs]
        return Served(
            [(tuple(o.token_ids), o.text, o.finish_reason) for o in each],
            [p.logprob for o in each for top in o.logprobs or [] for p in top.values()],
            llm.core.stats(),
        )

    return run


@pytest.fixture
def requests():
    """Prompts of 1 to 43 or 71 tokens; some are answered greedily, the others at random."""
    return [
        (
            [(5 * index + 3 * place + 1) % 400 for place in range(1 + at_depth(6, 10) * index)],
            {
                "temperature": index % 2,
                "seed": index,
                "max_tokens": 4 + index // at_depth(2, 1),
                "ignore_eos": True,
            },
        )
        for index in range(8)
    ]


@pytest.fixture
def make_runner(tiny_model, environment):
    """Return a function that loads the model and captures its graphs, in float16."""

    def make(
        *, capture=True, num_blocks=64, rows=4, tokens=TOKENS, max_model_len=64, drafts=0, **graphs
    ) -> ModelRunner:
        model = ModelConfig(
            str(tiny_model), dtype="float16", device="cpu", max_model_len=max_model_len
        )
        config = EngineConfig(
            model,
            KVConfig(num_blocks=num_blocks),
            SchedulerConfig(max_num_seqs=rows, max_num_batched_tokens=tokens, overlap=False),
            GraphConfig(**{"garbage_collection": True, **graphs}),
            speculative=SpeculativeConfig(
                "ngram" if drafts else None, num_speculative_tokens=drafts
            ),
        )
        runner = ModelRunner(config)
        runner.try_out()
        if capture:
            runner.capture_graphs()
        return runner

    return make
