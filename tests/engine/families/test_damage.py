"""Changed configs and damaged files are served as transformers does, or refused by name."""

from __future__ import annotations

import json
import random
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from depth import at_depth
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny, randomise
from tiny_answers import EXACT, ask, draw_prompts, serve, worst
from tiny_damages import change_config, damage_tensors

from kiln.engine.errors import ConfigError, ModelError

NAMES = list(all_tiny())
CONFIGS, FILES = at_depth((20, 10), (300, 100))
LOOSE = 5 * EXACT  # a changed size may make larger logits
PROMPTS = draw_prompts((3, 21))


def kept_folder(original, folder):
    shutil.copytree(original, folder)
    return folder, json.loads((folder / "config.json").read_text())


def model_of(one, folder):
    """Return transformers' model of a config, with random weights; None if it fails."""
    import transformers

    try:
        torch.manual_seed(5)
        config = transformers.AutoConfig.from_pretrained(folder)
        make = one.make or transformers.AutoModelForCausalLM.from_config
        if hasattr(config, "text_config"):
            make = transformers.AutoModelForImageTextToText.from_config
        model = make(config).float().eval()
        randomise(model, one.small)
        one.prepare(model)
        with torch.inference_mode():
            for prompt in PROMPTS:
                one.logits(model, torch.tensor([*prompt, 1, 2, 3]), len(prompt) + 10)
        model.save_pretrained(folder)
    except Exception:  # of any kind: transformers checks little
        return None
    return model


def outcome(folder, logits, words):
    """Return what is wrong with the answers or the refusal, "" if nothing; and if it served."""
    try:
        answers = ask(serve(folder), PROMPTS, whole=True)
    except (ConfigError, ModelError) as error:
        named = any(word in str(error) for word in words)
        return "" if named else f"refused without a name: {error}", False
    except Exception as error:
        return f"{type(error).__name__}: {error}", False
    off = 0.0 if logits is None else worst(logits, answers)
    return "" if off <= LOOSE else f"off by {off}", True


def changed(seed, made, folder):
    """Serve a changed config; return what was wrong, and whether it served."""
    chance = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    one = all_tiny()[name]
    folder, content = kept_folder(made(name)[0], folder)
    done = change_config(chance, content)
    text = json.dumps(content)
    (folder / "config.json").write_text(text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_of(one, folder)
    (folder / "config.json").write_text(text)  # as it was, not as transformers writes it
    logits = None if model is None else lambda ids, total: one.logits(model, ids, total)
    failure, served = outcome(folder, logits, [*all_keys(content), done.partition(" ")[0]])
    return failure and f"seed {seed}, {name}: {done}: {failure}", served


def all_keys(content):
    nested = [key for value in content.values() if isinstance(value, dict) for key in value]
    return [*content, *nested, "tensor"]


def damaged(seed, made, folder):
    """Serve damaged files; return what was wrong, and whether it served."""
    chance = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    folder, _ = kept_folder(made(name)[0], folder)
    (path,) = folder.glob("*.safetensors")
    if chance.random() < 0.2:
        cut = chance.randrange(path.stat().st_size)
        path.write_bytes(path.read_bytes()[:cut])
        done = f"{path.name} ends after {cut} bytes"
    else:
        tensors = load_file(path)
        done = damage_tensors(chance, tensors)
        save_file(tensors, path)
    failure, served = outcome(
        folder, made(name)[1], [path.name, done.partition(":")[0].rpartition(".")[0]]
    )
    return failure and f"seed {seed}, {name}: {done}: {failure}", served


@pytest.mark.parametrize(("trial", "count"), [(changed, CONFIGS), (damaged, FILES)])
def test_nothing_is_served_wrongly(made, tmp_path, trial, count):
    failures, served = [], 0
    for seed in range(count):
        folder = Path(tmp_path / "own")
        failure, was_served = trial(seed, made, folder)
        failures += [failure] if failure else []
        served += was_served
        shutil.rmtree(folder)
    if failures:
        pytest.fail("\n".join(failures))
    assert served < count
    assert served or trial is damaged
