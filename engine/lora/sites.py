"""The places of a model where an adapter can act: its projections and its embedding.

There its layers are replaced by ones that add what the adapters of a step's requests change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import torch

from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.lora.operators import lora_embedding, lora_linear
from kiln.engine.models.parameters import Projection


class Kind(Enum):
    """What a site's layer is; a backend may treat stacked projections in one call."""

    LINEAR = "linear"
    QKV = "qkv"
    GATE_UP = "gate_up"
    EMBEDDING = "embedding"
    HEAD = "head"  # sees only the tokens that need logits


_KINDS = {
    "qkv_proj": Kind.QKV,
    "gate_up_proj": Kind.GATE_UP,
    "o_proj": Kind.LINEAR,
    "down_proj": Kind.LINEAR,
    "shared_expert_gate": Kind.LINEAR,
    "lm_head": Kind.HEAD,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of the checkpoint, with its own A, B, rank and scale in each adapter.

    ``row`` is its row in the tables of the adapter pool. ``name`` is the checkpoint's, such as
    "model.layers.0.self_attn.q_proj". Its outputs begin at ``output_start`` of its site's.
    """

    row: int
    name: str
    input_size: int
    output_start: int
    output_size: int


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A layer of Kiln's: one part, or several that read the same input.

    For an embedding ``input_size`` is the vocabulary. ``rows``: [num_parts] int32 on the model's
    device, the rows of the parts in the tables of the adapter pool; its address tells the site.
    ``weight``: the layer's own, an embedding's as [vocabulary, hidden_size].
    """

    kind: Kind
    input_size: int
    parts: tuple[Part, ...]
    rows: torch.Tensor
    weight: Weight


@dataclass(frozen=True, slots=True)
class LoRALinear(Linear):
    """A Linear plus scale * B A x for the tokens of each adapter; ``rows`` as in Site."""

    rows: torch.Tensor = field(kw_only=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [num_tokens, in] to [num_tokens, out]."""
        weight = self.weight
        out = x.new_empty(len(x), weight.out_features)
        lora_linear(x, weight.tensors, self.bias, weight.form, self.rows, out)
        return out


@dataclass(frozen=True, slots=True)
class LoRAEmbedding(Embedding):
    """An Embedding plus scale * B A[:, token] for the tokens of each adapter."""

    rows: torch.Tensor = field(kw_only=True)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return [num_tokens, hidden_size]."""
        out = Embedding.__call__(self, token_ids)
        lora_embedding(token_ids, out, self.rows)
        return out


class Sites:
    """Wraps the layers of a model while it is built, and lists them.

    ``refused`` maps checkpoint names of layers that take no adapter to what they are.
    """

    def __init__(self) -> None:
        self.all: list[Site] = []
        self.refused: dict[str, str] = {}
        self._num_parts = 0

    @property
    def parts(self) -> list[Part]:
        """All parts, in the order of their rows."""
        return [part for site in self.all for part in site.parts]

    def linear(self, projection: Projection, layer: Linear) -> Linear:
        """Return a projection that adds the adapters' parts; the layer itself if it takes none."""
        kind = _KINDS.get(projection.name.rpartition(".")[2])
        if kind is None:
            self.refused.update(dict.fromkeys((name for name, _ in projection.parts), "a router"))
            return layer
        sizes = {name: share.room for name, share in projection.parts}
        site = self._add(kind, projection.inputs.room, sizes, layer.weight)
        return LoRALinear(layer.weight, layer.bias, rows=site.rows)

    def embedding(self, name: str, layer: Embedding) -> Embedding:
        """Return an embedding that adds the adapters' parts; ``name`` is the checkpoint's."""
        vocab_size, hidden_size = layer.weight.shape
        weight = DenseWeight(layer.weight)
        site = self._add(Kind.EMBEDDING, vocab_size, {name: hidden_size}, weight)
        return LoRAEmbedding(layer.weight, rows=site.rows)

    def _add(self, kind: Kind, input_size: int, sizes: Mapping[str, int], weight: Weight) -> Site:
        made, start = [], 0
        for name, size in sizes.items():
            made.append(Part(self._num_parts, name, input_size, start, size))
            self._num_parts += 1
            start += size
        rows = torch.tensor([one.row for one in made], dtype=torch.int32, device=weight.device)
        site = Site(kind, input_size, tuple(made), rows, weight)
        self.all.append(site)
        return site
