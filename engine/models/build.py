"""Build a decoder's layers from a config and a weight source with Hugging Face tensor names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GATES, GatedMLP
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.rotary import Rotary
from kiln.engine.layers.sparse_mlp import SharedExpert, SparseMLP
from kiln.engine.models.block import DecoderBlock
from kiln.engine.models.experts import Experts
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.parameters import Parameters, Projection, Wrapper
from kiln.engine.models.self_attention import SelfAttention
from kiln.engine.models.weights import Weights
from kiln.jit_kernels.ops.rotary.table import rotary_table


class Builder:
    """Builds layers; each method raises ModelError if a tensor is missing or has a wrong shape."""

    def __init__(
        self,
        config: HFConfig,
        weights: Weights,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        wrapper: Wrapper | None = None,
    ) -> None:
        self._config = config
        self._parameters = Parameters(weights, dtype, device, wrapper)
        self._shape = config.attention
        rope = config.rope
        table = rotary_table(rope.rotary_dim, max_model_len, rope.theta, rope.scaling)
        self._rotary = Rotary(table.to(device))

    def embedding(self) -> Embedding:
        """Build the token embedding."""
        sizes = (self._config.vocab_size, self._config.hidden_size)
        return self._parameters.embedding("model.embed_tokens", *sizes)

    def head(self, embedding: Embedding) -> Linear:
        """Build the projection to logits, or tie it to the embedding."""
        parts = (("lm_head", self._config.vocab_size),)
        projection = Projection("lm_head", parts, self._config.hidden_size)
        if self._config.tie_word_embeddings:
            return self._parameters.tied(projection, embedding.weight)
        return self._parameters.linear(projection)

    def norm(self, name: str, size: int) -> RMSNorm:
        """Build one norm over ``size`` dimensions."""
        return RMSNorm(self._parameters.tensor(f"{name}.weight", size), self._config.norm_eps)

    def block(self, layer: int) -> DecoderBlock:
        """Build one layer of the stack."""
        prefix, hidden = f"model.layers.{layer}.", self._config.hidden_size
        return DecoderBlock(
            self.norm(prefix + "input_layernorm", hidden),
            self._attention(prefix + "self_attn.", layer),
            self.norm(prefix + "post_attention_layernorm", hidden),
            self._feed_forward(prefix, layer),
        )

    def _attention(self, prefix: str, layer: int) -> SelfAttention:
        hidden, traits, shape = self._config.hidden_size, self._config.traits, self._shape
        qkv = {"q_proj": shape.query_size, "k_proj": shape.kv_size, "v_proj": shape.kv_size}
        norms = [
            self.norm(prefix + name, shape.head_dim)
            for name in ("q_norm", "k_norm")
            if traits.qk_norm
        ]
        output = {"o_proj": hidden}
        return SelfAttention(
            self._linear(f"layers.{layer}.qkv_proj", prefix, qkv, hidden, traits.qkv_bias),
            AttentionLayer(layer, shape, self._rotary, *norms),
            self._linear(
                f"layers.{layer}.o_proj", prefix, output, shape.query_size, traits.output_bias
            ),
        )

    def _feed_forward(self, prefix: str, layer: int) -> GatedMLP | SparseMLP:
        experts, name = self._config.traits.experts, f"layers.{layer}."
        if experts is None or not experts.layers[layer]:
            return self._mlp(name, prefix + "mlp.", self._config.intermediate_size)
        return self._experts(name, prefix + experts.names.layer, experts)

    def _experts(self, name: str, prefix: str, experts: Experts) -> SparseMLP:
        hidden, inner, count = (
            self._config.hidden_size,
            experts.intermediate_size,
            experts.num_experts,
        )
        names, make = experts.names, self._parameters
        places = [f"{prefix}experts.{index}." for index in range(count)]
        pairs = tuple((place + part, inner) for place in places for part in (names.gate, names.up))
        downs = tuple((place + names.down, hidden) for place in places)
        shared = None
        if experts.shared_size:
            gate = {"shared_expert_gate": 1}
            shared = SharedExpert(
                self._mlp(name + "shared_expert.", prefix + "shared_expert.", experts.shared_size),
                self._linear(name + "shared_expert_gate", prefix, gate, hidden),
            )
        return SparseMLP(
            router=self._linear(name + "router", prefix, {"gate": count}, hidden),
            gate_up=make.experts(Projection(name + "experts.gate_up_proj", pairs, hidden), count),
            down=make.experts(Projection(name + "experts.down_proj", downs, inner), count),
            top_k=experts.top_k,
            renormalise=experts.renormalise,
            shared=shared,
        )

    def _mlp(self, name: str, prefix: str, inner: int) -> GatedMLP:
        hidden, bias = self._config.hidden_size, self._config.traits.mlp_bias
        gate_up, down = {"gate_proj": inner, "up_proj": inner}, {"down_proj": hidden}
        return GatedMLP(
            self._linear(name + "gate_up_proj", prefix, gate_up, hidden, bias),
            GATES[self._config.activation],
            self._linear(name + "down_proj", prefix, down, inner, bias),
        )

    def _linear(
        self, name: str, prefix: str, parts: Mapping[str, int], width: int, bias: bool = False
    ) -> Linear:
        """Build one projection of ``width`` inputs; ``parts``: sizes by name after ``prefix``."""
        placed = tuple((prefix + part, size) for part, size in parts.items())
        return self._parameters.linear(Projection(name, placed, width, bias))
