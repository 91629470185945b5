"""Expressions of an adapter's config: Python's own matches, and none that never ends."""

from __future__ import annotations

import json
import re
import shutil
import time

import pytest
import torch

from kiln.engine.errors import AdapterError, ModelError
from kiln.engine.lora import expressions
from kiln.engine.lora.adapter import read_adapter
from kiln.engine.lora.expressions import Expression, settle

NAMES = [
    *(f"model.layers.{i}.{part}" for i in (0, 1, 11) for part in ("mlp.up_proj", "self_attn.q")),
    *("lm_head", "model.embed_tokens"),
]
TEXTS = [
    "q", "up_proj", r"layers\.1\.mlp\.up_proj", "layers.1", r".*\.(q|up_proj)", r"(?i)LM_head",
    r"(?:.*?(?:mlp|self_attn).*?(?:q|up_proj).*?)|(?:\bmodel\.embed\w+)",
    "(a)|lm_head", "", "[ml].*", r"(?<=model\.)layers|(?P<x>m)odel\.(?P=x)",
]  # fmt: skip


@pytest.mark.parametrize("full", [True, False])
def test_matches_and_groups_are_those_of_re(full):
    made = [Expression(text, full=full) for text in TEXTS]
    settle(made, NAMES, "here")
    assert {one.is_plain for one in made} == {True, False}
    for text, one in zip(TEXTS, made, strict=True):
        for name in NAMES:
            match = re.fullmatch(text, name) if full else re.match(text, name)
            assert one.matches(name) == (match is not None), (text, name)
            wanted = match[1] if match is not None and match.re.groups else None
            assert one.first_group(name) == wanted


@pytest.mark.parametrize("text", ["(", "a{2,1}", "x" * 4097, "(?P=x)"])
def test_what_is_no_expression(text):
    with pytest.raises(ValueError, match=r".+"):
        Expression(text)


BAD = r"(\w*\.?)*!"


def test_one_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(expressions, "SECONDS", 0.5)
    begun = time.monotonic()
    with pytest.raises(ModelError, match=r"here: its expressions take over 0\.5 s to match"):
        settle([Expression(BAD)], NAMES, "here")
    assert time.monotonic() - begun < 60  # without the limit it would take years


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
