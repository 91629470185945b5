"""Build the pieces of a model before it is served: its config is enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensorMode

from kiln.cache.env import Env
from kiln.engine.compile.artefacts import Artefacts
from kiln.engine.compile.compiled_model import build
from kiln.engine.compile.keys import target_of
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import Progress, load_model
from kiln.engine.models.split import WHOLE, Split
from kiln.engine.models.splitting import check_split


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
    ranks: Sequence[Split] = (WHOLE,),
) -> Ahead:
    """Fill the cache with what a start of the model with KILN_COMPILE loads; takes no weights.

    ``ranks``: those that will share the model. Their programs may differ, so each is built; the
    pieces are those of one rank. ``progress`` hears of (stage, done, total). Raises
    ConfigError if so many ranks cannot share the model, ModelError, PieceError, SealedCacheError.
    """
    check_split(config, len(ranks))
    artefacts, length = Artefacts(env, target_of(device)), 1  # no piece depends on the context
    pieces = 0
    for part in ranks:
        weights = DummyWeights(0, dtype)
        with FakeTensorMode(), torch.inference_mode():
            model = load_model(family, config, weights, length, dtype, device, split=part)
        program, _ = build(model, device, env.compile, artefacts, progress)
        pieces = len(program.pieces)
    return Ahead(pieces, artefacts.built)
