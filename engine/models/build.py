"""Build a decoder's layers from a config and a weight source with Hugging Face tensor names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.layers.embedding import Embedding
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.mlp import GATES, GatedMLP
from kiln.engine.layers.norm import RMSNorm
from kiln.engine.layers.parallel import SummingRMSNorm, VocabParallelEmbedding, VocabParallelHead
from kiln.engine.layers.rotary import Rotary
from kiln.engine.layers.sparse_mlp import SparseMLP
from kiln.engine.models.block import DecoderBlock, SelfAttention
from kiln.engine.models.build_experts import ExpertBuilder
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.kv_scales import read_kv_scales
from kiln.engine.models.parameters import Parameters, Projection, Wrapper
from kiln.engine.models.split import WHOLE, Share, Split, all_of
from kiln.engine.models.splitting import rank_attention
from kiln.engine.models.weights import Weights
from kiln.jit_kernels.ops.rotary.table import rotary_table


class Builder:
    """Builds layers; each method raises ModelError if a tensor is missing or has a wrong shape.

    ``split``: which part of the layers this rank builds. ``kv_dtype``: of the KV pool, None for
    the model's. Raises ConfigError if a size of the model cannot be divided so.
    """

    def __init__(
        self,
        config: HFConfig,
        weights: Weights,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        wrapper: Wrapper | None = None,
        split: Split = WHOLE,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.num_layers = config.num_layers
        self._config = config
        self._split = split
        self._weights, self._kv_dtype = weights, kv_dtype
        self._dtype, self._device = dtype, device
        self._parameters = Parameters(weights, config.quantization, dtype, device, wrapper)
        self._shape = rank_attention(config.attention, split)
        self._hidden = all_of(config.hidden_size)
        rope = config.rope
        table = rotary_table(config.head_dim, max_model_len, rope.theta, rope.scaling)
        self._rotary = Rotary(table.to(device))

    def embedding(self) -> Embedding | VocabParallelEmbedding:
        """Build the token embedding."""
        share = self._split.vocabulary(self._config.vocab_size)
        part = self._parameters.embedding(
            "model.embed_tokens",
            share,
            self._config.hidden_size,
            "lm_head" if self._config.tie_word_embeddings else None,
        )
        if self._split.world == 1:
            return part
        places = torch.full((share.whole,), share.room, dtype=torch.int64, device=self._device)
        places[share.place] = torch.arange(share.size, device=self._device)
        return VocabParallelEmbedding(places, part)

    def head(self, embedding: Embedding | VocabParallelEmbedding) -> Linear | VocabParallelHead:
        """Build the projection to logits, or tie it to the embedding.

        As in transformers 5, a checkpoint with another head than its embedding keeps both.
        """
        share = self._split.vocabulary(self._config.vocab_size)
        projection = Projection("lm_head", (("lm_head", share),), self._hidden)
        if self._config.tie_word_embeddings:
            part = self._parameters.tied(projection, embedding.weight)
        else:
            part = self._parameters.linear(projection)
        if self._split.world == 1:
            return part
        return VocabParallelHead(part, share.whole, self._split.group)

    def norm(self, name: str, size: int) -> RMSNorm:
        """Build one norm over ``size`` dimensions."""
        return RMSNorm(self._parameters.tensor(f"{name}.weight", size), self._config.norm_eps)

    def stream_norm(self, name: str) -> RMSNorm:
        """Build a norm of the residual stream, which sums what the ranks add to it."""
        norm = self.norm(name, self._config.hidden_size)
        if self._split.world == 1:
            return norm
        return SummingRMSNorm(norm.weight, norm.eps, self._split.group)

    def block(self, layer: int) -> DecoderBlock:
        """Build one layer of the stack."""
        prefix = f"model.layers.{layer}."
        return DecoderBlock(
            self.stream_norm(prefix + "input_layernorm"),
            self._attention(prefix + "self_attn.", layer),
            self.stream_norm(prefix + "post_attention_layernorm"),
            self._feed_forward(prefix, layer),
        )

    def _attention(self, prefix: str, layer: int) -> SelfAttention:
        traits, whole, split = self._config.traits, self._config.attention, self._split
        heads = split.equal(whole.num_heads, f"{prefix}q_proj", "heads")
        query = Share(*(number * whole.head_dim for number in heads))
        kv_heads = (whole.num_kv_heads, whole.head_dim)
        qkv = {
            "q_proj": query,
            "k_proj": split.kv_heads(*kv_heads, f"{prefix}k_proj"),
            "v_proj": split.kv_heads(*kv_heads, f"{prefix}v_proj"),
        }
        query_norm, key_norm = (
            self.norm(prefix + name, whole.head_dim) if traits.qk_norm else None
            for name in ("q_norm", "k_norm")
        )
        output = {"o_proj": self._hidden}
        scales = read_kv_scales(self._weights, prefix, self._kv_dtype)
        return SelfAttention(
            self._linear(f"layers.{layer}.qkv_proj", prefix, qkv, self._hidden, traits.qkv_bias),
            AttentionLayer(layer, self._shape, self._rotary, query_norm, key_norm, *scales),
            self._linear(f"layers.{layer}.o_proj", prefix, output, query, traits.output_bias),
        )

    def _feed_forward(self, prefix: str, layer: int) -> GatedMLP | SparseMLP:
        experts, name = self._config.traits.experts, f"layers.{layer}."
        if experts is None or not experts.layers[layer]:
            return self._mlp(name, prefix + "mlp.", self._config.intermediate_size)
        make = ExpertBuilder(experts, self._hidden, self._parameters, self._split, self._mlp)
        return make.layer(name, prefix)

    def _mlp(self, name: str, prefix: str, size: int) -> GatedMLP:
        bias = self._config.traits.mlp_bias
        inner = self._split.equal(size, f"{prefix}gate_proj", "outputs")
        gate_up, down = {"gate_proj": inner, "up_proj": inner}, {"down_proj": self._hidden}
        return GatedMLP(
            self._linear(name + "gate_up_proj", prefix, gate_up, self._hidden, bias),
            GATES[self._config.activation].operator,
            self._linear(name + "down_proj", prefix, down, inner, bias),
        )

    def _linear(
        self, name: str, prefix: str, parts: Mapping[str, Share], inputs: Share, bias: bool = False
    ) -> Linear:
        """Build one projection; ``parts``: the rank's outputs by name after ``prefix``."""
        placed = tuple((prefix + part, share) for part, share in parts.items())
        return self._parameters.linear(Projection(name, placed, inputs, bias))
