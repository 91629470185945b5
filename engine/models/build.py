"""Build a decoder's layers from a config and a weight source with Hugging Face tensor names."""

from __future__ import annotations

import torch

from kiln.engine.layers.embedding import Embedding, ScaledEmbedding
from kiln.engine.layers.head import LogitsHead
from kiln.engine.layers.layer_norm import LayerNorm, StreamLayerNorm
from kiln.engine.layers.linear import Linear
from kiln.engine.layers.norm import RMSNorm, StreamNorm
from kiln.engine.layers.parallel import VocabParallelEmbedding, VocabParallelHead
from kiln.engine.layers.query_scale import QueryScale, QueryScaling
from kiln.engine.layers.rotary import Rotary
from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.norms import RMS_FORMS, NormKind
from kiln.engine.models.parameters import Parameters, Projection, Wrapper
from kiln.engine.models.rope_config import RopeConfig
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
        self.config, self.split = config, split
        self.weights, self.kv_dtype = weights, kv_dtype
        self.parameters = Parameters(weights, config.quantization, dtype, device, wrapper)
        self.shape = rank_attention(config.attention, split)
        self.hidden = all_of(config.hidden_size)
        self._max_model_len, self._device = max_model_len, device
        self._rows: torch.Tensor | None = None  # of the embedding
        self._rotaries: dict[RopeConfig, Rotary] = {}
        self._query_scales: dict[QueryScaling, QueryScale] = {}

    def embedding(self) -> Embedding | VocabParallelEmbedding | ScaledEmbedding:
        """Build the token embedding."""
        part = self._embedding()
        self._rows = part.weight
        scale = self.config.traits.embedding_scale
        if self.config.traits.rounds_embedding_scale:
            scale = torch.tensor(scale, dtype=self.parameters.dtype).item()
        return part if scale == 1.0 else ScaledEmbedding(part, scale)

    def _embedding(self) -> Embedding | VocabParallelEmbedding:
        share = self.split.vocabulary(self.config.vocab_size)
        part = self.parameters.embedding(
            "model.embed_tokens",
            share,
            self.config.hidden_size,
            "lm_head" if self.config.tie_word_embeddings else None,
        )
        if self.split.world == 1:
            return part
        places = torch.full((share.whole,), share.room, dtype=torch.int64, device=self._device)
        places[share.place] = torch.arange(share.size, device=self._device)
        return VocabParallelEmbedding(places, part, self.split.group)

    def head(self) -> Linear | VocabParallelHead | LogitsHead:
        """Build the projection to logits, or tie it to the embedding, which is built before.

        As in transformers 5, a checkpoint with another head than its embedding keeps both.
        """
        traits, part = self.config.traits, self._head()
        if (traits.logit_scale, traits.logit_soft_cap) == (1.0, 0.0):
            return part
        return LogitsHead(part, traits.logit_scale, traits.logit_soft_cap)

    def _head(self) -> Linear | VocabParallelHead:
        share = self.split.vocabulary(self.config.vocab_size)
        projection = Projection("lm_head", (("lm_head", share),), self.hidden)
        if self.config.tie_word_embeddings and self._rows is not None:
            part = self.parameters.tied(projection, self._rows)
        else:
            part = self.parameters.linear(projection)
        if self.split.world == 1:
            return part
        return VocabParallelHead(part, share.whole, self.split.group)

    def norm(self, name: str, size: int | Share) -> RMSNorm:
        """Build one norm over ``size`` dimensions, or its weights for the rank's share of them."""
        return RMSNorm(self.parameters.tensor(f"{name}.weight", size), *self._norm_form())

    def unit_norm(self, size: int) -> RMSNorm:
        """Build a norm without a weight."""
        weight = torch.ones(size, dtype=self.parameters.dtype, device=self._device)
        return RMSNorm(weight, self.config.norm_eps)

    def stream_norm(self, name: str) -> StreamNorm | StreamLayerNorm:
        """Build a norm of the residual stream."""
        kind, size, eps = self.config.traits.norm, self.config.hidden_size, self.config.norm_eps
        weight, bias = self.parameters.tensor(f"{name}.weight", size), None
        if kind in RMS_FORMS:
            return StreamNorm(weight, *self._norm_form())
        if kind is NormKind.LAYER_ZERO_CENTRED:
            bias = self.parameters.tensor(f"{name}.bias", size)
        offset = float(kind is NormKind.LAYER_ZERO_CENTRED)
        return StreamLayerNorm(LayerNorm(weight, bias, eps, offset))

    def _norm_form(self) -> tuple[float, float, bool]:
        """Return eps, the offset of the weight, and whether the product is rounded once."""
        return self.config.norm_eps, *RMS_FORMS[self.config.traits.norm]

    def rotary(self, rope: RopeConfig) -> Rotary:
        """Return a rotary embedding, the same one for the same config."""
        if rope not in self._rotaries:
            length = self._max_model_len
            start = self.config.long_start(length)
            table = rotary_table(rope.dim, length, rope.theta, rope.scaling, start)
            self._rotaries[rope] = Rotary(table.to(self._device))
        return self._rotaries[rope]

    def query_scale(self, scaling: QueryScaling) -> QueryScale:
        """Return what scales queries by their position, the same one for the same config."""
        if scaling not in self._query_scales:
            start = self.config.long_start(self._max_model_len)
            table = scaling.table(self._max_model_len, self.parameters.dtype)
            table = torch.cat((table[:start], table))  # the rows of rotary tables
            self._query_scales[scaling] = QueryScale(table.to(self._device))
        return self._query_scales[scaling]
