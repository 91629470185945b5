"""Damaged and mislabelled quantised checkpoints are served right, or refused by name."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace

import pytest
from damages import damage
from depth import at_depth
from emulated_models import Emulated
from packers.packer import all_packers
from quantised_answers import ask, assert_agrees, draw_prompts, serve
from quantised_folders import families_of

from kiln.engine.errors import ConfigError, ModelError

PACKERS = sorted(all_packers())
TRIALS = at_depth(40, 500)


def is_right(models, answers):
    """Whether the answers agree with one of the models."""
    for model in models:
        try:
            assert_agrees(model, answers)
        except AssertionError:
            continue
        return True
    return False


def trial(seed, quantised, folder):
    """Serve a damaged checkpoint; return what was wrong with what came of it, and if it served."""
    chance = random.Random(seed)
    name = PACKERS[seed % len(PACKERS)]
    made = quantised(name, chance.choice(families_of(all_packers()[name])))
    done = damage(chance, made, folder)
    case = f"seed {seed}, {name}: {done.what}"
    try:
        answers = ask(serve(folder), draw_prompts((3, 6, 11, 2)))
    except (ConfigError, ModelError) as error:
        named = any(word in str(error) for word in done.told)
        return ("" if named else f"{case}: {error}"), False
    except Exception as error:
        return f"{case}: {type(error).__name__}: {error}", False
    model = Emulated(made, modules=done.modules or None)
    models = [model, replace(model, rounds=False)] if not done.modules else [model]
    return ("" if is_right(models, answers) else f"{case}: wrong numbers"), True


def test_nothing_damaged_is_served_wrongly(quantised, tmp_path):
    failures, served = [], 0
    for seed in range(TRIALS):
        failure, was_served = trial(seed, quantised, tmp_path / "own")
        failures += [failure] if failure else []
        served += was_served
        shutil.rmtree(tmp_path / "own")
    if failures:
        pytest.fail("\n".join(failures))
    assert 0 < served < TRIALS / 2  # some changes change nothing
