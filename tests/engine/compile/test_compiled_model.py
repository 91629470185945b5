"""Compiled pieces give what the model gives, and a second start neither traces nor compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kiln
from kiln import LLM, SamplingParams
from kiln.engine.attention import operator
from kiln.engine.attention.context import AttentionStep, attention_step
from kiln.engine.compile import compiled_model
from kiln.engine.graphs.emulator import EmulatedGraphs
from kiln.engine.models.registry import known_families
from kiln.engine.runner import loaded_model
from kiln.jit_kernels.declare.settings import settings

ROOT = Path(kiln.__file__).resolve().parents[3]
DEMO = ROOT / "engine" / "demo"
COUNTS = (7, 1, 2, 33, 3, 64)  # tokens of a step
PROMPTS = ["What is 123 + 456?", "Reverse the word planet.", "a"]


def refuse(*arguments, **named):
    raise AssertionError("a second start must not do this")


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """Return a function from a mode to the demo model's greedy answers."""

    def answer(mode, **more):
        env = replace(settings(), compile=mode, kernel_cache_dir=tmp_path / "cache", **more)
        monkeypatch.setattr(loaded_model, "settings", lambda: env)
        llm = LLM(str(DEMO), device="cpu", dtype="float32", max_model_len=128, max_chunk_tokens=5)
        chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=16))
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


@pytest.mark.parametrize("architecture", sorted(known_families()))
def test_pieces_that_are_not_compiled_give_the_bits_of_the_model(
    make_model, start, hidden, architecture
):
    model = make_model(architecture)
    split = start(model, "eager")
    for tokens in COUNTS:
        assert torch.equal(hidden(split, tokens), hidden(model, tokens)), tokens


def test_greedy_tokens_are_the_same_with_pieces(tokens):
    assert tokens("eager") == tokens("off")


def test_off_leaves_the_model_alone(make_model, env):
    model = make_model("LlamaForCausalLM")
    assert compiled_model.compiled(model, torch.device("cpu"), env("off"), refuse) is model


def test_a_second_start_traces_nothing(make_model, start, hidden, monkeypatch):
    model = make_model("Qwen3ForCausalLM")
    start(model, "eager")
    monkeypatch.setattr(compiled_model, "trace", refuse)
    again = start(make_model("Qwen3ForCausalLM", seed=1), "eager")  # other weights, same structure
    assert not torch.equal(hidden(again, 3), hidden(model, 3))
    with pytest.raises(AssertionError, match="second start"):
        start(make_model("Qwen3ForCausalLM", num_hidden_layers=4), "eager")


@torch.inference_mode()
def test_a_graph_can_be_captured_of_the_pieces(make_model, start):
    """Nothing is read on the host, and every replay takes its inputs from the same memory."""
    model = make_model("Qwen2MoeForCausalLM", mlp_only_layers=[0, 1, 2])
    split = start(model, "eager")
    ids, positions = torch.tensor([3, 1, 4]), torch.arange(3)

    def attend(step, qkv, positions, out):
        out.copy_(qkv[:, : out.shape[1]] * 2 + positions[:, None])

    step = AttentionStep([attend] * len(model.attention_layers), None, None)
    results = []
    with attention_step(step):
        devices = EmulatedGraphs({operator.attention: operator.run})
        graph = devices.capture(lambda _: results.append(split.forward(ids, positions)))
        ids.copy_(torch.tensor([9, 2, 7]))
        positions.add_(5)
        graph.replay()
        assert torch.equal(results[0], model.forward(ids, positions))


STARTS = """
import json, os, sys
from kiln import LLM, SamplingParams
from kiln.jit_kernels.declare.settings import settings
answers = []
for mode in ("off", "eager"):
    os.environ["KILN_COMPILE"] = mode
    settings.cache_clear()
    llm = LLM(sys.argv[1], device="cpu", dtype="float32", max_model_len=64, num_kv_blocks=8)
    [output] = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4))
    answers.append(list(output.outputs[0].token_ids))
heavy = [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules]
print(json.dumps([answers, type(llm.core.runner.loaded.model).__name__, heavy]))
"""


def test_neither_the_default_start_nor_a_second_one_imports_dynamo(tmp_path, tokens):
    tokens("eager")  # a first start
    environ = {"KILN_KERNEL_CACHE_DIR": str(tmp_path / "cache"), "KILN_KERNEL_CACHE": "sealed"}
    environ |= {"PYTHONPATH": str(ROOT / "tools" / "import_root")}
    out = subprocess.check_output(
        [sys.executable, "-c", STARTS, str(DEMO)], env=os.environ | environ, timeout=300
    )
    (by_default, second), model, heavy = json.loads(out.splitlines()[-1])
    assert by_default == second
    assert model == "CompiledModel"
    assert heavy == []
