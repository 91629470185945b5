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

from kiln.engine.errors import ConfigError
from kiln.engine.lora.adapter import Adapter, LoRAPair
from kiln.engine.lora.sites import Kind, Part, Site

_ROW_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``world`` ranks. With fewer KV heads than ranks, several ranks share a head."""

    rank: int
    world: int
    num_kv_heads: int

    def adapter(self, adapter: Adapter, sites: Sequence[Site]) -> Adapter:
        """Return the rank's part of an adapter, views of its tensors.

        ``sites``: those of the whole model. Raises ConfigError if a size is not divisible.
        """
        parts = ((site, part) for site in sites for part in site.parts)
        return Adapter(
            adapter.name,
            {
                part.row: self.pair(adapter.pairs[part.row], site, part)
                for site, part in parts
                if part.row in adapter.pairs
            },
        )

    def pair(self, pair: LoRAPair, site: Site, part: Part) -> LoRAPair:
        """Return the rank's part of the pair of one part of a site. Raises ConfigError."""
        a, b = pair.a, pair.b
        if site.kind is Kind.EMBEDDING:
            a = a[:, self._of_vocabulary(site.input_size)]
        elif site.kind is Kind.HEAD:
            b = b[self._of_vocabulary(part.output_size)]
        elif site.kind is Kind.QKV and not part.name.endswith("q_proj"):
            b = b[self._of_kv_heads(part)]
        elif site.kind in (Kind.QKV, Kind.GATE_UP):
            b = b[self._equal(part.output_size, part.name, "outputs")]
        elif part.name.endswith(_ROW_PARALLEL):
            a = a[:, self._equal(part.input_size, part.name, "inputs")]
        return LoRAPair(a, b, pair.scale)

    def _equal(self, size: int, name: str, what: str) -> slice:
        if size % self.world:
            raise ConfigError(f"{self.world} GPUs: {name} has {size} {what}, not a multiple of it")
        own = size // self.world
        return slice(self.rank * own, (self.rank + 1) * own)

    def _of_kv_heads(self, part: Part) -> slice:
        if self.num_kv_heads >= self.world:
            return self._equal(part.output_size, part.name, "outputs")
        if self.world % self.num_kv_heads:
            raise ConfigError(
                f"{self.world} GPUs: {part.name} has {self.num_kv_heads} heads, and neither number "
                "is a multiple of the other"
            )
        head = part.output_size // self.num_kv_heads
        own = self.rank * self.num_kv_heads // self.world
        return slice(own * head, (own + 1) * head)

    def _of_vocabulary(self, size: int) -> slice:
        """Return equal parts, of which the last ranks' are shorter: the layer's are padded."""
        own = -(-size // self.world)
        return slice(min(self.rank * own, size), min((self.rank + 1) * own, size))
