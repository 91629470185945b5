"""Expressions of an adapter's config are matched within a time limit, wherever they stand."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from kiln.engine.errors import AdapterError
from kiln.engine.lora.adapter import read_adapter
from kiln.engine.models import expressions

BAD = r"(\w*\.?)*!"


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": BAD},
        {"exclude_modules": BAD},
        {"rank_pattern": {BAD: 3}},
        {"alpha_pattern": {BAD: 3}},
        {"layers_to_transform": [0], "layers_pattern": [BAD]},
    ],
)
def test_no_key_of_an_adapter_escapes_the_limit(made, sites, tmp_path, monkeypatch, config):
    monkeypatch.setattr(expressions, "SECONDS", 0.3)
    folder = tmp_path / "bad"
    shutil.copytree(made("llama").adapters["rank-1"], folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    with pytest.raises(AdapterError, match=r"LoRA adapter 'mine': .* take over 0\.3 s"):
        read_adapter("mine", folder, sites(made("llama").folder), torch.float32)
