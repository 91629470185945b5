"""Build a checkpoint's model without values, and note what its tensors lack."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from kiln.engine.compile.parameters import parts_of
from kiln.engine.errors import ConfigError
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.sparse_mlp import SparseMLP
from kiln.engine.layers.weight import DEQUANTISED
from kiln.engine.lora.sites import Sites
from kiln.engine.models.build import Builder
from kiln.engine.models.build_layer import LayerBuilder
from kiln.engine.models.family import Family
from kiln.engine.models.header_weights import HeaderWeights, NoValues, SoundValues
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import as_asked_for
from kiln.engine.models.parameters import Projection
from kiln.engine.models.renamed_weights import HeadlessWeights
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.split import Share

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What is wrong with a checkpoint's tensors; how Kiln keeps each kind of module.

    ``forms``: text of a form -> roles such as "qkv_proj". ``dequantised``: the forms whose products
    are of dequantised weights unless a GPU multiplies the codes. ``targets``: modules, by the last
    parts of their names, where LoRA adapters can act.
    """

    problems: tuple[str, ...]
    forms: dict[str, list[str]]
    dequantised: frozenset[str]
    targets: tuple[str, ...]


@dataclass
class _Listing:
    """Wraps layers for adapters, and lists the forms of their weights."""

    sites: Sites = field(default_factory=Sites)
    forms: dict[str, list[str]] = field(default_factory=dict)

    def linear(self, projection: Projection, layer: Linear) -> Linear:
        """Return the layer with adapters."""
        self.add(layer.weight.describe(), projection.role)
        return self.sites.linear(projection, layer)

    def embedding(self, name: str, vocabulary: Share, layer: Embedding) -> Embedding:
        """Return the layer with adapters."""
        self.add(str(layer.weight.dtype).removeprefix("torch."), name.rpartition(".")[2])
        return self.sites.embedding(name, vocabulary, layer)

    def add(self, form: str, role: str) -> None:
        """Note that the weights of a role have a form."""
        known = self.forms.setdefault(form, [])
        if role not in known:
            known.append(role)


def inspect(
    family: Family, config: HFConfig, source: SafetensorsWeights, *, headless: bool
) -> Inspection:
    """Compare the headers of a checkpoint's files with what its model asks for.

    ``headless``: the model is for embeddings, whose names may be shorter. A part that cannot be
    built is one problem, and the next one is built.
    """
    headers, listing = HeaderWeights(source), _Listing()
    weights = as_asked_for(family, config, HeadlessWeights(headers) if headless else headers)
    failed: list[Exception] = []
    with SoundValues(), torch.inference_mode():
        build = Builder(config, weights, 1, config.dtype, _META, wrapper=listing)
        layers = [partial(_layer, family, build, layer) for layer in range(config.num_layers)]
        last = partial(build.stream_norm, "model.norm")
        parts: list[Callable[[], object]] = [build.embedding, *layers, last, build.head]
        for make in parts:
            if make == build.head and failed and config.tie_word_embeddings:
                continue  # it may need the embedding
            try:
                built = make()
            except (ConfigError, ValueError) as error:
                failed.append(error)
                continue
            for sparse in parts_of(built, SparseMLP):
                for role in ("gate_up", "down"):
                    listing.add(getattr(sparse, role).describe(), f"experts.{role}_proj")
    if not failed:  # else nobody has asked for the tensors of what could not be built
        weights.finish()
    leaves = dict.fromkeys(part.name.rpartition(".")[2] for part in listing.sites.parts)
    own = [str(error) for error in failed if not isinstance(error, NoValues)]
    problems = summed_up([*own, *headers.problems])
    slow = frozenset(form for form in listing.forms if DEQUANTISED in form)
    return Inspection(tuple(problems), listing.forms, slow, tuple(leaves))


def _layer(family: Family, build: Builder, layer: int) -> object:
    return family.block(LayerBuilder(build, layer))


def summed_up(problems: Iterable[str]) -> Sequence[str]:
    """Return one text of those that differ in numbers alone, with how many there are."""
    kinds: dict[str, list[str]] = {}
    for problem in problems:
        kinds.setdefault(re.sub(r"\d+", "0", problem), []).append(problem)
    return [
        same[0] if len(same) == 1 else f"{same[0]} (and {len(same) - 1} more like it)"
        for same in kinds.values()
    ]
