"""Rules for names: the first match counts, from the start of a name, in one process for all."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from kiln.engine.models import name_rules
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.name_rules import NameRules
from kiln.engine.models.safetensors_weights import SafetensorsWeights

DUMMY = DummyWeights(0, torch.float32)


@pytest.fixture
def settled(monkeypatch):
    """The names that each process was asked for."""
    calls = []
    original = name_rules.settle

    def spy(expressions, names, what):
        calls.append(list(names))
        return original(expressions, names, what)

    monkeypatch.setattr(name_rules, "settle", spy)
    return calls


def test_the_first_rule_that_matches_from_the_start_counts():
    rules = NameRules(
        [("b", 1), ("a.*", 2), (r"a\.b", 3), ("c|(x.)+d", None), (r"d\.*", 4)], "what"
    )
    assert rules.first("a.b", DUMMY) == (2,)
    assert rules.first("ab", DUMMY) == (2,)
    assert rules.first("bab", DUMMY) == (1,)
    assert rules.first("cab", DUMMY) == (None,)
    assert rules.first("x.x.d", DUMMY) == (None,)
    assert rules.first("xxd", DUMMY) == (None,)
    assert rules.first("d...", DUMMY) == (4,)
    assert rules.first("xyz", DUMMY) is None


def test_all_names_of_a_checkpoint_are_matched_in_one_process(tmp_path, settled):
    names = [f"model.layers.{layer}.mlp.gate" for layer in range(30)]
    save_file({f"{n}.qweight": torch.zeros(1) for n in names}, tmp_path / "model.safetensors")
    source, rules = SafetensorsWeights(tmp_path), NameRules([(r".*\.(3|7)\..*gate", 1)], "what")
    found = [name for name in names if rules.first(name, source) is not None]
    assert found == [names[3], names[7]]
    assert len(settled) == 1


def test_the_experts_of_a_made_up_layer_are_matched_in_one_process(settled):
    rules = NameRules([(r".*experts\.(3|7)\..*gate", 1)], "what")
    names = [f"model.layers.0.mlp.experts.{index}.gate_proj" for index in range(128)]
    assert [rules.first(name, DUMMY) for name in names].count((1,)) == 2
    assert len(settled) == 1


def test_rules_are_equal_by_their_texts_and_values():
    assert NameRules([("a", 1)], "x") == NameRules([("a", 1)], "y")
    assert hash(NameRules([("a", 1)], "x")) == hash(NameRules([("a", 1)], "y"))
    assert NameRules([("a", 1)], "x") != NameRules([("a", 2)], "x")
    assert NameRules([("a", 1)], "x") != NameRules([("b", 1)], "x")
