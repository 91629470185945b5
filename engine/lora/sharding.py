"""An adapter's weights on one of several GPUs, split as tensor parallelism splits the layers.

    layer                          A                    B
    q, k, v, gate, up, LM head     whole                the rank's outputs
    o, down, embedding             the rank's inputs    whole
    others                         whole                whole

Where A is split, each rank adds a partial sum. The all-reduce of the layer adds these up too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.sites import Kind, Part, Site, Sites
from kiln.engine.models.family import Family
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.loader import build_without_weights
from kiln.engine.models.split import Split

_ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """One of several ranks. With fewer KV heads than ranks, several ranks share a head."""

    split: Split
    num_kv_heads: int

    def adapter(self, adapter: Adapter, sites: Sequence[Site]) -> Adapter:
        """Return the rank's part of an adapter, views of its tensors.

        ``sites``: those of the whole model. Raises ConfigError if a size is not divisible.
        """
        pairs = {}
        for site in sites:
            for part in site.parts:
                if part.row in adapter.pairs:
                    pair, (outputs, inputs) = adapter.pairs[part.row], self.places(site, part)
                    pairs[part.row] = LoRAPair(pair.a[:, inputs], pair.b[outputs], pair.scale)
        return Adapter(adapter.name, pairs)

    def places(self, site: Site, part: Part) -> tuple[slice, slice]:
        """Return which outputs and inputs of a part of a site the rank has. Raises ConfigError."""
        outputs, inputs, split = slice(None), slice(None), self.split
        if site.kind is Kind.EMBEDDING:
            inputs = split.vocabulary(site.input_size).place
        elif site.kind is Kind.HEAD:
            outputs = split.vocabulary(part.output_size).place
        elif site.kind is Kind.QKV and not part.name.endswith("q_proj"):
            head_dim = part.output_size // self.num_kv_heads
            outputs = split.kv_heads(self.num_kv_heads, head_dim, part.name).place
        elif site.kind in (Kind.QKV, Kind.GATE_UP):
            outputs = split.equal(part.output_size, part.name, "outputs").place
        elif part.name.endswith(_ROW_PARALLEL):
            inputs = split.equal(part.input_size, part.name, "inputs").place
        return outputs, inputs


class AdapterShard:
    """What a rank keeps of the adapters of a model.

    ``sites`` are those of the whole model, which the files of an adapter must fit; they have no
    memory. Raises ConfigError if a size is not divisible.
    """

    def __init__(self, family: Family, config: HFConfig, split: Split) -> None:
        self.sites = Sites()
        build_without_weights(family, config, self.sites)
        self._shard = Shard(split, config.num_kv_heads)
        self.places = self._shard.places

    def __call__(self, adapter: Adapter) -> Adapter:
        """Return the rank's part of an adapter, views of its tensors."""
        return self._shard.adapter(adapter, self.sites.all)
