"""What a step of a decoder computes, and the memory that it takes, by the model's config."""

from __future__ import annotations

import torch

from kiln.engine.models.hf_config import HFConfig
from kiln.engine.models.parameter_count import parameters_read

_SPARE = 1.5  # what torch's allocator takes, of what tensors need


def step_flops(config: HFConfig, num_tokens: int) -> float:
    """Return the operations of a step that computes one prompt from its start.

    Two for each weight that a token meets, of experts the chosen ones, and four for each element of
    a query and key that it attends to. The embedding and the LM head do not count: few rows of a
    step need logits.
    """
    active = parameters_read(config, 1) - config.vocab_size * config.hidden_size
    pairs = 0.0  # of a query and a key
    for window in config.windows:
        seen = num_tokens if window is None else min(window, num_tokens)
        pairs += seen * (num_tokens - seen / 2)
    return 2 * active * num_tokens + 4 * config.num_heads * config.head_dim * pairs


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
