"""The parts that a family composes its layers of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.layer_norm import StreamLayerNorm
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GATES, GatedMLP, PlainMLP
from kiln.engine.layers.norm import RMSNorm, RoundedStreamNorm, StreamNorm
from kiln.engine.layers.parallel import RowParallel
from kiln.engine.layers.partial_sum import Sum
from kiln.engine.layers.projection_norm import ProjectionNorm
from kiln.engine.layers.query_scale import QueryScale
from kiln.engine.models.block import SelfAttention
from kiln.engine.models.build import Builder
from kiln.engine.models.build_experts import ExpertBuilder
from kiln.engine.models.hf_config import QKNorm, Traits
from kiln.engine.models.kv_scales import read_kv_scales
from kiln.engine.models.parameters import Projection
from kiln.engine.models.rotary_order import Order, halves_of_pairs
from kiln.engine.models.split import Share, stacked

Layer = Callable[..., Sum]


class LayerBuilder:
    """Builds the parts of one layer of a decoder; names are those behind the layer's prefix.

    Attention and feed-forward layers return partial sums where ranks share them. Methods raise
    ModelError and ConfigError as those of Builder.
    """

    def __init__(self, build: Builder, layer: int) -> None:
        self.traits: Traits = build.config.traits
        self.attention_layers: list[AttentionLayer] = []
        self._build, self._layer = build, layer
        self._prefix, self._name = f"model.layers.{layer}.", f"layers.{layer}."

    def norm(self, name: str) -> RMSNorm:
        """Build a norm of what a layer returns, which is not added to the residual stream yet."""
        return self._build.norm(self._prefix + name, self._build.config.hidden_size)

    def stream_norm(self, name: str) -> StreamNorm | StreamLayerNorm:
        """Build a norm of the residual stream, to which it adds what the layer before returned."""
        return self._build.stream_norm(self._prefix + name)

    def norm_before(
        self, layer: Layer, name: str
    ) -> StreamNorm | StreamLayerNorm | RoundedStreamNorm:
        """Build the same in front of a layer, which is the only one that reads it.

        If the layer wants its inputs rounded, the norm rounds them.
        """
        norm, first = self.stream_norm(name), first_product(layer)
        if first is None or not isinstance(norm, StreamNorm):
            return norm
        rounding = first.rounding(norm.weight.dtype, len(norm.weight), *norm.kernels)
        return norm if rounding is None else RoundedStreamNorm(norm, rounding)

    def attention(self, name: str = "self_attn", *, fused: str = "") -> Layer:
        """Build the self-attention: (positions, x) -> what it adds.

        ``fused``: the layer that the checkpoint has in the place of q_proj, k_proj and v_proj.
        """
        prefix, build, whole = f"{self._prefix}{name}.", self._build, self._build.config.attention
        heads = build.split.equal(whole.num_heads, f"{prefix}q_proj", "heads")
        query = Share(*(number * whole.head_dim for number in heads))
        kv_heads = (whole.num_kv_heads, whole.head_dim)
        qkv = {
            "q_proj": query,
            "k_proj": build.split.kv_heads(*kv_heads, f"{prefix}k_proj"),
            "v_proj": build.split.kv_heads(*kv_heads, f"{prefix}v_proj"),
        }
        biases = self.traits.qkv_bias, self.traits.output_bias
        own = build.shape
        order = self._order(own.num_heads + own.num_kv_heads, own.num_kv_heads * own.head_dim)
        norm = self._projection_norm(prefix, query, qkv["k_proj"])
        layer = SelfAttention(
            self._linear(
                "qkv_proj", prefix, qkv, build.hidden, biases[0], fused=fused, order=order
            ),
            self._attention_layer(prefix, heads),
            self._linear("o_proj", prefix, {"o_proj": build.hidden}, query, biases[1]),
            norm,
            self._query_scale(),
        )
        return self._summed(layer)

    def _order(self, num_heads: int, others: int = 0) -> Order:
        """Return the order of the outputs of heads, and of ``others`` behind them."""
        rope, shape = self._build.config.ropes[self._layer], self._build.shape
        if rope is None or not self.traits.interleaved:
            return ()
        return halves_of_pairs(num_heads, shape.head_dim, rope.dim, others)

    def _ordered_norm(self, name: str, size: int | Share, num_heads: int) -> RMSNorm:
        """Build a norm over heads, in the order of the projection's outputs."""
        norm, order = self._build.norm(name, size), self._order(num_heads)
        return replace(norm, weight=norm.weight[list(order)]) if order else norm

    def _head_norms(self, prefix: str, *, rotates: bool) -> tuple[RMSNorm | None, RMSNorm | None]:
        """Build the norms over each head of queries and of keys."""
        size, kind = self._build.shape.head_dim, self.traits.qk_norm
        if kind is QKNorm.HEAD_WITHOUT_WEIGHT and rotates:
            norm = self._build.unit_norm(size)
            return norm, norm
        if kind is not QKNorm.HEAD:
            return None, None
        return (
            self._ordered_norm(f"{prefix}q_norm", size, 1),
            self._ordered_norm(f"{prefix}k_norm", size, 1),
        )

    def _projection_norm(self, prefix: str, query: Share, key: Share) -> ProjectionNorm | None:
        """Build the norms over the queries and keys of all heads, of which ranks have some."""
        if self.traits.qk_norm is not QKNorm.PROJECTION:
            return None
        build, split = self._build, self._build.split
        norms = (
            self._ordered_norm(f"{prefix}q_norm", query, build.shape.num_heads),
            self._ordered_norm(f"{prefix}k_norm", key, build.shape.num_kv_heads),
        )
        copies = max(1, split.world // build.config.num_kv_heads)
        return ProjectionNorm(*norms, split.group, copies)

    def _query_scale(self) -> QueryScale | None:
        scaling = self._build.config.query_scalings[self._layer]
        return None if scaling is None else self._build.query_scale(scaling)

    def _attention_layer(self, prefix: str, heads: Share) -> AttentionLayer:
        build, rope = self._build, self._build.config.ropes[self._layer]
        sinks = None
        if self.traits.sinks:
            sinks = build.parameters.tensor(f"{prefix}sinks", heads, dtype=torch.float32)
        layer = AttentionLayer(
            self._layer,
            build.shape,
            None if rope is None else build.rotary(rope),
            *self._head_norms(prefix, rotates=rope is not None),
            *read_kv_scales(build.weights, prefix, build.kv_dtype),
            scale=self.traits.scale,
            soft_cap=build.config.soft_caps[self._layer],
            sinks=sinks,
        )
        self.attention_layers.append(layer)
        return layer

    def feed_forward(self, name: str = "mlp") -> Layer:
        """Build the feed-forward layer, x -> what it adds: with experts if this layer has some."""
        experts, build = self.traits.experts, self._build
        if experts is None or not experts.layers[self._layer]:
            return self.mlp(name)
        place = (build.hidden, build.parameters, build.split, self._gated_mlp)
        return self._summed(ExpertBuilder(experts, *place).layer(self._name, self._prefix))

    def mlp(self, name: str = "mlp", *, fused: str = "", down: str = "down_proj") -> Layer:
        """Build the feed-forward layer without experts: x -> what it adds.

        ``fused``: the layer that the checkpoint has in the place of gate_proj and up_proj;
        ``down``: what it calls the last one.
        """
        size, prefix = self._build.config.intermediate_size, f"{self._prefix}{name}."
        if not self.traits.gated:
            return self._summed(self._plain_mlp(prefix, size))
        return self._summed(self._gated_mlp(self._name, prefix, size, fused, down))

    def _gated_mlp(
        self, name: str, prefix: str, size: int, fused: str = "", down: str = "down_proj"
    ) -> GatedMLP:
        build, bias = self._build, self.traits.mlp_bias
        inner = build.split.equal(size, f"{prefix}gate_proj", "outputs")
        parts, activation = {"gate_proj": inner, "up_proj": inner}, build.config.activation
        gate_up = self._linear("gate_up_proj", prefix, parts, build.hidden, bias, name, fused)
        last = self._linear("down_proj", prefix, {down: build.hidden}, inner, bias, name)
        rounding = None
        if activation == "silu":
            rounding = last.rounding(build.parameters.dtype, inner.room, GATES[activation])
        return GatedMLP(gate_up, activation, last, rounding)

    def _plain_mlp(self, prefix: str, size: int) -> PlainMLP:
        build, bias = self._build, self.traits.mlp_bias
        inner = build.split.equal(size, f"{prefix}up_proj", "outputs")
        return PlainMLP(
            self._linear("up_proj", prefix, {"up_proj": inner}, build.hidden, bias),
            build.config.activation,
            self._linear("down_proj", prefix, {"down_proj": build.hidden}, inner, bias),
        )

    def _linear(
        self,
        role: str,
        prefix: str,
        parts: Mapping[str, Share],
        inputs: Share,
        bias: bool,
        name: str = "",
        fused: str = "",
        order: Order = (),
    ) -> Linear:
        """Build one projection; ``parts``: the rank's outputs by name after ``prefix``.

        ``fused``: the one layer of the checkpoint that holds them all, behind each other.
        """
        placed = tuple((prefix + part, share) for part, share in parts.items())
        if fused:
            placed = tuple((prefix + fused, share) for share in stacked([*parts.values()]))
        projection = Projection((name or self._name) + role, placed, inputs, bias, order)
        return self._build.parameters.linear(projection)

    def _summed(self, layer: Callable[..., torch.Tensor]) -> Layer:
        split = self._build.split
        return layer if split.world == 1 else RowParallel(layer, split.group)


def first_product(layer: object) -> Linear | None:
    """Return the projection that reads what a layer reads, if no other part of it does."""
    match layer:
        case RowParallel():
            return first_product(layer.layer)
        case SelfAttention():
            return layer.qkv
        case GatedMLP():
            return layer.gate_up
        case PlainMLP():
            return layer.up
    return None
