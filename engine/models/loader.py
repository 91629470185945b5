"""Build a model, with its weights or without."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kiln.engine.models.build import Builder
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.dummy_weights import DummyWeights
from kiln.engine.models.family import Family, Model
from kiln.engine.models.fused_experts import FusedExperts
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.parameters import Wrapper
from kiln.engine.models.quantization import UNQUANTIZED
from kiln.engine.models.renamed_weights import TextWeights
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import WHOLE, Split
from kiln.engine.models.weights import Weights

Progress = Callable[[str, int, int], None]  # stage, done, total


def load_model(  # noqa: PLR0913 (see Builder)
    family: Family,
    config: HFConfig,
    weights: Weights,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress = lambda stage, done, total: None,
    wrapper: Wrapper | None = None,
    split: Split = WHOLE,
    kv_dtype: torch.dtype | None = None,
) -> Model:
    """Build a model that computes in ``dtype``; ``progress`` reports each layer.

    Its stage is "weights", in bytes of this rank, or "random weights", in layers.
    ``wrapper`` may replace its layers; see Parameters. ``split``: the part of this rank.
    ``kv_dtype``: of the KV pool, whose scales are read if it holds 8-bit floats; None: no such.

    Raises ModelError if the weights are missing, corrupt or do not match the config.
    """
    weights = as_asked_for(family, config, weights)
    layers, total = config.num_layers, weights.progress[1] // split.world

    def tell(done: int) -> None:
        if total:
            progress("weights", min(weights.progress[0], total), total)
        else:
            progress("random weights", done, layers)

    tell(0)
    builder = Builder(config, weights, max_model_len, dtype, device, wrapper, split, kv_dtype)
    model = family.build(builder, tell)
    weights.finish()
    if total:
        progress("weights", total, total)
    return model


def as_asked_for(family: Family, config: HFConfig, weights: Weights) -> Weights:
    """Return a source with the names that the family's layers ask for."""
    for name in weights.names if family.unused else ():
        found = re.fullmatch(family.unused, name)
        if found and int(found.groupdict().get("layer", config.num_layers)) >= config.num_layers:
            weights.ignore(name)
    if config.wrapped:
        weights = TextWeights(weights)
    if config.traits.experts is not None:
        weights = FusedExperts(weights, config.traits.experts)
    return weights


def open_weights(folder: Path, load_format: str, seed: int, dtype: torch.dtype) -> Weights:
    """Return the weight source for a load format; dummy weights report ``dtype``.

    Raises ModelError.
    """
    return DummyWeights(seed, dtype) if load_format == "dummy" else SafetensorsWeights(folder)


def sample_layers(family: Family, config: HFConfig) -> list[object]:
    """Return a layer of each kind that a model has, and its last norm, on the meta device.

    Their weights are floats. Raises ModelError.
    """
    config = replace(config, quantization=UNQUANTIZED)
    place, weights = torch.device("meta"), DummyWeights(0, config.dtype)
    build = Builder(config, weights, 1, config.dtype, place)
    experts = config.traits.experts
    sparse = (False,) * config.num_layers if experts is None else experts.layers
    kinds = zip(config.windows, config.ropes, sparse, strict=True)
    firsts = {kind: layer for layer, kind in reversed([*enumerate(kinds)])}
    blocks = [family.block(LayerBuilder(build, layer)) for layer in sorted(firsts.values())]
    return [*blocks, build.stream_norm("model.norm")]


def build_without_weights(family: Family, config: HFConfig, wrapper: Wrapper) -> None:
    """Build a model on the meta device, so that ``wrapper`` gets its layers. Raises ModelError.

    The layers have the sizes of the model's, but floats as weights.
    """
    place, weights = torch.device("meta"), DummyWeights(0, config.dtype)
    config = replace(config, quantization=UNQUANTIZED)
    load_model(family, config, weights, 1, config.dtype, place, wrapper=wrapper)
