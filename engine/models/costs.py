"""How many weights a decoder has, and what a step of it reads, computes and takes of memory."""

from __future__ import annotations

import torch

from kiln.engine.kv.shape import Window, window_number
from kiln.engine.models.hf_config import HFConfig
from kiln.jit_kernels.ops.attention.visible import first_visible

_SPARE = 1.5  # what torch's allocator takes, of what tensors need


def count_parameters(config: HFConfig) -> int:
    """Return the number of weights of a decoder, without biases and per-head norms."""
    experts = config.traits.experts
    tables = 1 if config.tie_word_embeddings else 2
    return _count(config, experts.num_experts if experts is not None else 0, tables)


def parameters_read(config: HFConfig, num_tokens: int) -> int:
    """Return how many of these weights a step of ``num_tokens`` tokens must read.

    Of the embedding a step reads only one row per token, unless it is also the LM head. Of the
    experts it reads those that at least one token chose: on average, if every token chooses its
    ``top_k`` at random, ``num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)``.
    """
    experts, read = config.traits.experts, 0.0
    if experts is not None:
        missed = (1 - experts.top_k / experts.num_experts) ** num_tokens
        read = experts.num_experts * (1 - missed)
    return _count(config, read, 1)


def stored_bytes(config: HFConfig, dtype: torch.dtype) -> int:
    """Return roughly the bytes of all weights in memory, of a model that computes in ``dtype``."""
    tables = 1 if config.tie_word_embeddings else 2
    return _bytes(config, dtype, count_parameters(config), tables)


def bytes_read(config: HFConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """Return roughly the bytes of the weights that a step of ``num_tokens`` tokens must read."""
    return _bytes(config, dtype, parameters_read(config, num_tokens), 1)


def _bytes(config: HFConfig, dtype: torch.dtype, num_weights: int, tables: int) -> int:
    """Count ``tables`` of the vocabulary in ``dtype``, because they are seldom quantised."""
    floats = tables * config.vocab_size * config.hidden_size
    bits = config.quantization.bits or 8 * dtype.itemsize
    return int(floats * dtype.itemsize + (num_weights - floats) * bits / 8)


def _count(config: HFConfig, num_experts: float, tables: int) -> int:
    """Count with ``num_experts`` experts per sparse layer, and 1 or 2 tables of the vocabulary."""
    heads = config.num_heads + 2 * config.num_kv_heads
    attention = config.hidden_size * config.head_dim * (heads + config.num_heads)
    mlp = (3 if config.traits.gated else 2) * config.hidden_size * config.intermediate_size
    layers = config.num_layers * (attention + mlp + 2 * config.hidden_size)
    experts = config.traits.experts
    if experts is not None:
        of_experts = round(num_experts * experts.intermediate_size) + experts.shared_size
        routers = experts.num_experts + (experts.shared_size > 0 and experts.shared_gate)
        sparse = config.hidden_size * (3 * of_experts + routers)
        layers += sum(experts.layers) * (sparse - mlp)
    return layers + tables * config.vocab_size * config.hidden_size + config.hidden_size


def keys_seen(config: HFConfig, context: int) -> int:
    """Return how many keys the last of ``context`` tokens attends to, of all layers together."""
    firsts = (first_visible(context, window_number(window)) for window in config.windows)
    return sum(context - max(0, first) for first in firsts)


def step_flops(config: HFConfig, num_tokens: int) -> float:
    """Return the operations of a step that computes one prompt from its start.

    Two for each weight that a token meets, of experts the chosen ones, and four for each element of
    a query and key that it attends to. The embedding and the LM head do not count: few rows of a
    step need logits.
    """
    active = parameters_read(config, 1) - config.vocab_size * config.hidden_size
    pairs = sum(_pairs(window, num_tokens) for window in config.windows)
    return 2 * active * num_tokens + 4 * config.num_heads * config.head_dim * pairs


def _pairs(window: Window | None, num_tokens: int) -> float:
    """Return how many pairs of a query and a key a layer computes of such a prompt."""
    seen = num_tokens if window is None else min(window.size, num_tokens)
    if window is not None and window.chunked:
        whole, rest = divmod(num_tokens, seen)
        return (whole * seen**2 + rest**2) / 2
    return seen * (num_tokens - seen / 2)


def step_bytes(config: HFConfig, dtype: torch.dtype, num_tokens: int, world: int = 1) -> int:
    """Return roughly the temporary memory of a step's forward pass on one of ``world`` ranks.

    The residual stream and its copies, and the widest layer: the products of the feed-forward layer
    or, of experts, those of the chosen ones with their sums in float32.
    """
    hidden, experts = config.hidden_size, config.traits.experts
    size = dtype.itemsize * (4 * hidden + 3 * config.intermediate_size / world)
    if experts is not None:
        chosen = dtype.itemsize * (2 * hidden + 3 * experts.intermediate_size / world)
        size = max(size, dtype.itemsize * 4 * hidden + experts.top_k * (chosen + 12 * hidden))
    return int(_SPARE * num_tokens * size)
