"""The places of a model where an adapter can act: its projections and its embedding.

There its layers are replaced by ones that add what the adapters of a step's requests change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from typing import ClassVar

import torch

from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.rounding import Rounded
from kiln.engine.layers.weight import DenseWeight, Weight
from kiln.engine.lora.operators import lora_embedding, lora_linear
from kiln.engine.models.parameters import Projection
from kiln.engine.models.rotary_order import Order
from kiln.engine.models.split import Share, all_of


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
    "up_proj": Kind.LINEAR,  # without a gate
    "shared_expert_gate": Kind.LINEAR,
    "lm_head": Kind.HEAD,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One layer of the checkpoint, with its own A, B, rank and scale in each adapter.

    ``row`` is its row in the tables of the adapter pool. ``name`` is the checkpoint's, such as
    "model.layers.0.self_attn.q_proj". This rank has the ``inputs`` and ``outputs`` of it: of a
    layer that holds q, k and v, or gate and up, the rank may have several runs of outputs. They
    begin at ``output_start`` of its site's. ``order`` as in Projection, of these outputs alone.
    """

    row: int
    name: str
    inputs: Share
    output_start: int
    outputs: tuple[Share, ...]
    order: Order = ()

    @property
    def input_size(self) -> int:
        """The number of inputs on this rank."""
        return self.inputs.room

    @property
    def output_size(self) -> int:
        """The number of outputs on this rank."""
        return sum(share.room for share in self.outputs)

    @property
    def whole_size(self) -> tuple[int, int]:
        """The number of outputs and of inputs on all ranks."""
        return self.outputs[0].whole, self.inputs.whole


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A layer of Kiln's: one part, or several that read the same input.

    For an embedding ``input_size`` is the rank's vocabulary. ``rows``: [num_parts] int32 on the
    model's device, the rows of the parts in the tables of the adapter pool; its address tells the
    site.
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
    ends_here: ClassVar[bool] = False

    def __call__(self, x: torch.Tensor | Rounded) -> torch.Tensor:
        """Map x [num_tokens, in] to [num_tokens, out]; adapters need x as it is, not rounded."""
        assert not isinstance(x, Rounded)
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
        stored, order = projection.parts, projection.order
        site = self._add(kind, projection.inputs, stored, layer.weight, order)
        return LoRALinear(layer.weight, layer.bias, rows=site.rows)

    def embedding(self, name: str, vocabulary: Share, layer: Embedding) -> Embedding:
        """Return an embedding that adds the adapters' parts; ``name`` is the checkpoint's."""
        num_rows, hidden_size = layer.weight.shape
        parts, weight = ((name, all_of(hidden_size)),), DenseWeight(layer.weight)
        site = self._add(Kind.EMBEDDING, vocabulary._replace(room=num_rows), parts, weight)
        return LoRAEmbedding(layer.weight, rows=site.rows)

    def _add(
        self,
        kind: Kind,
        inputs: Share,
        parts: Sequence[tuple[str, Share]],
        weight: Weight,
        order: Order = (),
    ) -> Site:
        made, start = list[Part](), 0
        for name, runs in groupby(parts, lambda part: part[0]):
            outputs = tuple(share for _, share in runs)
            end = start + sum(share.room for share in outputs)
            own = tuple(output - start for output in order[start:end])
            made.append(Part(self._num_parts, name, inputs, start, outputs, own))
            self._num_parts += 1
            start = end
        rows = torch.tensor([one.row for one in made], dtype=torch.int32, device=weight.device)
        site = Site(kind, inputs.room, tuple(made), rows, weight)
        self.all.append(site)
        return site
