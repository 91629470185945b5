"""Build the pieces of a model before it is served: its config is enough."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch._subclasses import FakeTensorMode

from kiln.cache.env import Env
from kiln.engine.compile.artefacts import Artefacts
from kiln.engine.compile.compiled_model import Progress, build
from kiln.engine.compile.keys import target_of
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import load_model


class Ahead(NamedTuple):
    """How many pieces a model has, and how many artefacts were built, its program included."""

    pieces: int
    built: int


def build_ahead(
    family: Family,
    config: HFConfig,
    dtype: torch.dtype,
    device: torch.device,
    env: Env,
    progress: Progress,
) -> Ahead:
    """Fill the cache with what a start of the model with KILN_COMPILE loads; takes no weights.

    ``progress`` hears of (stage, done, total). Raises ModelError, PieceError and SealedCacheError.
    """
    weights, length = DummyWeights(0, dtype), 1  # no piece depends on the length of the context
    with FakeTensorMode(), torch.inference_mode():
        model = load_model(family, config, weights, length, dtype, device, _silent)
    artefacts = Artefacts(env, target_of(device))
    program, _ = build(model, device, env.compile, artefacts, progress)
    return Ahead(len(program.pieces), artefacts.built)


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
