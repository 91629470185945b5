"""A family with a block of its own is one new file, which the whole engine then serves."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from tiny.model import Tiny
from tiny_answers import ask, assert_agrees, draw_prompts, serve

from kiln.engine.models import families
from kiln.engine.models.registry import known_families

GRAPHS = {"KILN_CPU_GRAPHS": "emulate", "KILN_GRAPH_STRICT": "1", "KILN_GRAPH_VERIFY": "off"}
FILE = '''
"""Attention and a feed-forward layer side by side, then a norm of their sum."""

import torch

from kiln.engine.layers.partial_sum import Sum, plus, scaled, total
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.fields import Fields
from kiln.engine.models.hf_config import Traits


def traits(fields: Fields) -> Traits:
    return Traits(qkv_bias=True, residual_scale=fields.number("strength"), logit_scale=0.5)


class Block:
    def __init__(self, build: LayerBuilder) -> None:
        self.norm_before = build.stream_norm("input_layernorm")
        self.attention = build.attention()
        self.mlp = build.mlp()
        self.norm_behind = build.norm("post_attention_layernorm")
        self.strength = build.traits.residual_scale

    def __call__(self, positions: torch.Tensor, x: Sum, residual: torch.Tensor) -> Sum:
        x = self.norm_before(x, residual)
        both = plus(self.attention(positions, x), self.mlp(x))
        return scaled(self.norm_behind(total(both)), self.strength)


FAMILY = Family(("TrialForCausalLM",), traits, Block, {"strength": 1.0})
'''


def edit(content):
    content["architectures"], content["strength"] = ["TrialForCausalLM"], 0.7
    del content["attention_bias"], content["mlp_bias"]


def prepare(model):
    """Let a Llama compute the same."""

    def forward(layer, hidden_states, **rest):
        x = layer.input_layernorm(hidden_states)
        both = layer.self_attn(hidden_states=x, **rest)[0] + layer.mlp(x)
        return hidden_states + 0.7 * layer.post_attention_layernorm(both)

    kind = type(model.model.layers[0])
    for layer in model.model.layers:
        layer.__class__ = type("TrialLayer", (kind,), {"forward": forward})
        for name in ("q", "k", "v"):
            weight = getattr(layer.self_attn, f"{name}_proj").weight
            bias = torch.nn.Parameter(torch.randn(weight.shape[0]))
            getattr(layer.self_attn, f"{name}_proj").bias = bias
    norm = model.model.norm
    norm.register_forward_hook(lambda module, inputs, out: out / 2)  # as half the logits


@pytest.fixture
def trial(tmp_path, monkeypatch):
    (tmp_path / "side_by_side.py").write_text(FILE)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    known_families.cache_clear()
    folder = tmp_path / "model"
    model = Tiny("trial", "LlamaConfig", edit=edit, prepare=prepare).save(folder)
    assert json.loads((folder / "config.json").read_text())["strength"] == 0.7

    @torch.inference_mode()
    def logits(token_ids, total):
        return model(token_ids[None]).logits[0]

    yield folder, logits
    known_families.cache_clear()
    del sys.modules[f"{families.__name__}.side_by_side"]


@pytest.mark.parametrize("kernels", ["torch", "host"])
def test_it_is_served_in_graphs_and_in_chunks(trial, environment, kernels):
    environment(KILN_CPU_KERNELS=kernels, KILN_JIT_AFTER_READY="error", **GRAPHS)
    folder, logits = trial
    llm = serve(folder, max_chunk_tokens=16, max_num_seqs=4, cuda_graph_bs=[4])
    assert_agrees(logits, ask(llm, draw_prompts((1, 9, 26))))
    assert not llm.core.stats().graph_fallbacks
