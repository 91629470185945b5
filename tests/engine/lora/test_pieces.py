"""Adapters in compiled pieces: the same tokens, and no more pieces than without adapters."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kiln import LLM, SamplingParams
from kiln.engine.compile.split import split
from kiln.engine.compile.trace import trace
from kiln.engine.lora.sites import Sites
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.runner import loaded_model
from kiln.jit_kernels.declare.settings import settings

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_tokens_are_pefts(made, answers, tmp_path, monkeypatch, mode):
    env = replace(settings(), compile=mode, kernel_cache_dir=tmp_path / "cache")
    monkeypatch.setattr(loaded_model, "settings", lambda: env)
    prompts, lora, wanted = (part[::2] for part in answers("llama"))
    modules = {form: str(made("llama").adapters[form]) for form in lora if form}
    folder = str(made("llama").folder)
    llm = LLM(folder, device="cpu", num_kv_blocks=128, lora_modules=modules)
    outputs = llm.generate(prompts, GREEDY, lora=lora)
    assert [list(output.outputs[0].token_ids) for output in outputs] == wanted


def test_the_layers_share_their_pieces(made, tmp_path):
    config = json.loads((made("llama").folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    family, read = read_model(tmp_path)

    def pieces(sites):
        weights = DummyWeights(0, torch.float32)
        with torch.inference_mode():
            model = load_model(
                family, read, weights, 64, torch.float32, CPU, lambda *_: None, sites
            )
        return split(trace(model, CPU)).pieces

    plain, wrapped = pieces(None), pieces(Sites())
    assert len(wrapped) == len(plain) == 3
    targets = [call.target for piece in wrapped for call in piece.calls]
    assert targets.count("ops.kiln.lora_linear.default") == 1 + 4 + 3
    assert targets.count("ops.kiln.lora_embedding.default") == 1
