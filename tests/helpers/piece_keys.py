"""What the keys of a model's program and pieces are made of; as a program it prints them as JSON.

Arguments of the program: the folder of the model's config.json, and a seed of its weights. Its host
has another name.
"""

from __future__ import annotations

import json
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from kiln.engine.compile.keys import piece_ingredients, program_ingredients
from kiln.engine.compile.split import split
from kiln.engine.compile.trace import trace
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.loader import load_model
from kiln.engine.models.registry import read_model


def all_ingredients(folder: Path, seed: int) -> list[Any]:
    """Return the ingredients of the keys of the program, and of each of its pieces."""
    family, config = read_model(folder)
    cpu, kind = torch.device("cpu"), torch.float32
    weights = DummyWeights(seed, kind)
    with torch.inference_mode():
        model = load_model(family, config, weights, 64, kind, cpu, lambda *told: None)
    program = split(trace(model, cpu))
    pieces = [piece_ingredients(piece, "inductor", "", cpu) for piece in program.pieces]
    return [program_ingredients(model), *pieces]


if __name__ == "__main__":
    socket.gethostname = platform.node = lambda: "another"
    print(json.dumps(all_ingredients(Path(sys.argv[1]), int(sys.argv[2]))))
