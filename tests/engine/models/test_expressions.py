"""Expressions of a config: Python's own matches, and none that never ends."""

from __future__ import annotations

import re
import time

import pytest

from kiln.engine.errors import ModelError
from kiln.engine.models import expressions
from kiln.engine.models.expressions import Expression, settle

NAMES = [
    *(f"model.layers.{i}.{part}" for i in (0, 1, 11) for part in ("mlp.up_proj", "self_attn.q")),
    *("lm_head", "model.embed_tokens"),
]
TEXTS = [
    "q", "up_proj", r"layers\.1\.mlp\.up_proj", "layers.1", r".*\.(q|up_proj)", r"(?i)LM_head",
    r"(?:.*?(?:mlp|self_attn).*?(?:q|up_proj).*?)|(?:\bmodel\.embed\w+)",
    ".*up_proj$", ".*self_attn", "(a)|lm_head", "", "[ml].*",
    r"(?<=model\.)layers|(?P<x>m)odel\.(?P=x)",
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


def test_names_behind_any_text_take_no_process(monkeypatch):
    monkeypatch.setattr(expressions, "SECONDS", 0)
    for text in (".*q", r"model\.layers\.\d\.mlp", ".*up_proj$"):
        one = Expression(text)
        settle([one], NAMES, "here")
        assert [one.matches(name) for name in NAMES] == [bool(re.match(text, n)) for n in NAMES]


def test_more_names_can_be_settled_later():
    one = Expression("(model|head).*")
    settle([one], NAMES[:3], "here")
    settle([one], ["head.a", "other"], "here")
    wanted = {**dict.fromkeys(NAMES[:3], "model"), "head.a": "head", "other": None}
    assert {name: one.first_group(name) for name in wanted} == wanted


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
