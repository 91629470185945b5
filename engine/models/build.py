"""Build a decoder's layers from a config and a source of weights, by Hugging Face's names."""

from __future__ import annotations

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
from kiln.engine.models.self_attention import SelfAttention
from kiln.engine.models.weights import Weights
from kiln.jit_kernels.ops.rotary.table import rotary_table


class Builder:
    """Makes layers; each method raises ModelError when a tensor is missing or misshapen."""

    def __init__(
        self, config: HFConfig, weights: Weights, max_model_len: int, device: torch.device
    ) -> None:
        self._config = config
        self._weights = weights
        self._shape = config.attention
        rope = config.rope
        table = rotary_table(rope.rotary_dim, max_model_len, rope.theta, rope.scaling)
        self._rotary = Rotary(table.to(device))

    def embedding(self) -> Embedding:
        """Build the token embedding."""
        sizes = (self._config.vocab_size, self._config.hidden_size)
        return Embedding(self._weights.tensor("model.embed_tokens.weight", *sizes))

    def head(self, embedding: Embedding) -> Linear:
        """Build the projection to logits, or tie it to the embedding."""
        if self._config.tie_word_embeddings:
            self._weights.ignore("lm_head.weight")
            return Linear(embedding.weight)
        return self._linear("", ("lm_head",), (self._config.vocab_size,), self._config.hidden_size)

    def norm(self, name: str, size: int) -> RMSNorm:
        """Build one norm over ``size`` dimensions."""
        return RMSNorm(self._weights.tensor(f"{name}.weight", size), self._config.norm_eps)

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
        names, rows = ("q_proj", "k_proj", "v_proj"), (shape.query_size, *[shape.kv_size] * 2)
        norms = [
            self.norm(prefix + name, shape.head_dim)
            for name in ("q_norm", "k_norm")
            if traits.qk_norm
        ]
        return SelfAttention(
            self._linear(prefix, names, rows, hidden, traits.qkv_bias),
            AttentionLayer(layer, shape, self._rotary, *norms),
            self._linear(prefix, ("o_proj",), (hidden,), shape.query_size, traits.output_bias),
        )

    def _feed_forward(self, prefix: str, layer: int) -> GatedMLP | SparseMLP:
        experts = self._config.traits.experts
        if experts is None or not experts.layers[layer]:
            return self._mlp(prefix + "mlp.", self._config.intermediate_size)
        return self._experts(prefix + experts.names.layer, experts)

    def _experts(self, prefix: str, experts: Experts) -> SparseMLP:
        hidden, inner = self._config.hidden_size, experts.intermediate_size
        names = experts.names
        places = [f"{prefix}experts.{index}." for index in range(experts.num_experts)]
        pairs = [f"{place}{name}.weight" for place in places for name in (names.gate, names.up)]
        downs = [f"{place}{names.down}.weight" for place in places]
        shared = None
        if experts.shared_size:
            shared = SharedExpert(
                self._mlp(prefix + "shared_expert.", experts.shared_size),
                self._linear(prefix, ("shared_expert_gate",), (1,), hidden),
            )
        return SparseMLP(
            router=self._linear(prefix, ("gate",), (experts.num_experts,), hidden),
            gate_up=self._weights.stacked(pairs, [inner] * len(pairs), hidden).unflatten(
                0, (experts.num_experts, 2 * inner)
            ),
            down=self._weights.stacked(downs, [hidden] * len(downs), inner).unflatten(
                0, (experts.num_experts, hidden)
            ),
            top_k=experts.top_k,
            renormalise=experts.renormalise,
            shared=shared,
        )

    def _mlp(self, prefix: str, inner: int) -> GatedMLP:
        hidden, bias = self._config.hidden_size, self._config.traits.mlp_bias
        return GatedMLP(
            self._linear(prefix, ("gate_proj", "up_proj"), (inner, inner), hidden, bias),
            GATES[self._config.activation],
            self._linear(prefix, ("down_proj",), (hidden,), inner, bias),
        )

    def _linear(
        self,
        prefix: str,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        width: int,
        bias: bool = False,
    ) -> Linear:
        """Build one projection [sum(rows), width] of several tensors below each other."""
        parts = [prefix + name for name in names]
        weight = self._weights.stacked([f"{part}.weight" for part in parts], rows, width)
        if not bias:
            return Linear(weight)
        return Linear(weight, self._weights.stacked([f"{part}.bias" for part in parts], rows))
