"""torch.compile traces every family in one graph, once, for any number of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from depth import at_depth

import kiln
from kiln.engine.attention.context import AttentionStep, attention_step
from kiln.engine.config import EngineConfig, KVConfig, ModelConfig, SchedulerConfig
from kiln.engine.models.registry import known_families
from kiln.engine.requests.batch import Batch, ScheduledRequest
from kiln.engine.requests.sampling_params import SamplingParams
from kiln.engine.runner.inputs import StepInputs
from kiln.engine.runner.model_runner import ModelRunner

DEMO = Path(kiln.__file__).parent / "engine" / "demo"
EXPERTS = ["Qwen2MoeForCausalLM"]
COUNTS = (7, 1, 2, 33, 3, 1, 16)  # tokens of a step


def load(folder, **settings):
    model = ModelConfig(str(folder), **{"device": "cpu", "max_model_len": 64, **settings})
    kv = KVConfig(block_size=4, num_blocks=32)
    return ModelRunner(EngineConfig(model, kv, SchedulerConfig(overlap=False)))


@pytest.fixture
def made(tmp_path, small_config):
    """Return a function that makes a model with random weights, or the demo."""

    def make(architecture, **settings):
        if architecture == "demo":
            return load(DEMO, **settings)
        (tmp_path / "config.json").write_text(json.dumps(small_config(architecture)))
        return load(tmp_path, load_format="dummy", **settings)

    return make


def inputs_of(runner, tokens):
    """A prefill and three decodes; up to three tokens, decodes alone."""
    counts = [tokens - 3, 1, 1, 1] if tokens > 3 else [1] * tokens
    rows = [
        ScheduledRequest(
            str(row), row, count, 2 * row, [(7 * row + i) % 50 for i in range(count)], 0,
            list(range(10 * row, 10 * row + 10)) if row < 3 else [30, 31], True, 0,
            SamplingParams(), 0,
        )
        for row, count in enumerate(counts)
    ]  # fmt: skip
    batch = Batch(tuple(rows))
    inputs = StepInputs(
        max_requests=4,
        max_tokens=64,
        max_model_len=64,
        block_size=4,
        vocab_size=runner.vocab_size,
        device=runner.device,
    )
    inputs.use_pool(runner.pool.token_ids)
    inputs.send(batch)
    return inputs.make(batch)


def forward(runner, function, tokens):
    """Run a step's layers, traced or not, on a pool that holds the same whichever it is."""
    for layer in range(runner.loaded.hf.num_layers):
        for keys_or_values in runner.pool.views(layer):
            keys_or_values.fill_(0.25)
    inputs = inputs_of(runner, tokens)
    token_ids, positions = inputs.token_ids, inputs.positions
    for tensor in (token_ids, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    plan = runner.loaded.attention.plan(inputs.metadata)
    with attention_step(AttentionStep(runner.executor.step.layers, inputs.metadata, plan)):
        return function(token_ids, positions)


@pytest.fixture
def compiled():
    """Return a function that compiles one and the list of graphs that compiling gave."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def compile_(function, backend=keep):
        return torch.compile(function, backend=backend, fullgraph=True), graphs

    # Without this torch takes a count of one for a constant, and compiles for it once more.
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):
        yield compile_
    torch._dynamo.reset()


@pytest.mark.quick(3)
@pytest.mark.parametrize("architecture", ["demo", *sorted(known_families())])
@torch.inference_mode()
def test_one_graph_serves_any_number_of_tokens(made, compiled, architecture):
    runner = made(architecture)
    eager = runner.loaded.model.forward
    traced, graphs = compiled(eager)
    for tokens in COUNTS:
        assert torch.equal(forward(runner, traced, tokens), forward(runner, eager, tokens)), tokens
    assert len(graphs) == 1
    operators = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    layers = runner.loaded.hf.num_layers
    assert operators.count("kiln.attention.default") == layers
    assert not any(name.startswith("kiln.rope") or "rotary" in name for name in operators)


@pytest.mark.parametrize("architecture", at_depth(EXPERTS, ["demo", *EXPERTS]))
@torch.inference_mode()
def test_functionalised_it_gives_the_same(made, compiled, architecture):
    runner = made(architecture)
    eager = runner.loaded.model.forward
    traced, _ = compiled(eager, "aot_eager")
    for tokens in (7, 1, 16):
        assert torch.equal(forward(runner, traced, tokens), forward(runner, eager, tokens)), tokens


@torch.inference_mode()
def test_models_of_two_kinds_in_one_process_keep_their_own_layers(made):
    """The same layer numbers, other sizes, dtypes and pools: one after the other and in turns."""
    models = [made("demo", dtype="bfloat16"), made("MistralForCausalLM")]
    alone = [[forward(m, m.loaded.model.forward, tokens) for tokens in COUNTS] for m in models]
    for index, tokens in enumerate(COUNTS):
        for model, wanted in zip(models, alone, strict=True):
            assert torch.equal(forward(model, model.loaded.model.forward, tokens), wanted[index])
