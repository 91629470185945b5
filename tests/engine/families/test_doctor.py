"""``kiln doctor MODEL`` refuses the files that do not load, and no others, in every family."""

from __future__ import annotations

import random
import shutil

import torch
from depth import at_depth
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny
from tiny_damages import damage_tensors

from kiln.engine.cli.doctor_model import examine_model
from kiln.engine.errors import ConfigError
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model
from kiln.engine.models.safetensors_weights import SafetensorsWeights

DAMAGES = at_depth(2, 40)


def error_of(folder):
    """Return why a model cannot be loaded, "" if it can."""
    try:
        family, config = read_model(folder)
        source = SafetensorsWeights(folder)
        load_model(family, config, source, 64, torch.float32, torch.device("cpu"))
    except ConfigError as error:
        return str(error)
    return ""


def problems_of(folder):
    return [one.meaning for one in examine_model(folder) if one.state == "broken"]


def test_headers_decide_as_loading_does(made, tmp_path):
    for seed, name in enumerate(DAMAGES * list(all_tiny())):
        folder = made(name)[0]
        if seed < len(all_tiny()):
            assert problems_of(folder) == []
        own = shutil.copytree(folder, tmp_path / str(seed))
        tensors = load_file(own / "model.safetensors")
        done = damage_tensors(random.Random(seed), tensors)
        save_file(tensors, own / "model.safetensors", {"format": "pt"})
        error, problems = error_of(own), problems_of(own)
        assert bool(error) == bool(problems), f"seed {seed}, {name}: {done}: {error}, {problems}"
        if error:
            assert error in problems or len(problems) > 1, f"seed {seed}, {name}: {done}"
        shutil.rmtree(own)
