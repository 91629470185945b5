"""The config.json of a small model of every family."""

from __future__ import annotations

import pytest

from kiln.engine.models.registry import known_families

_SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_OWN_SIZES = {  # of the families that know these keys
    "sliding_window": 5,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [1],
}


@pytest.fixture
def small_config():
    """Return a function from an architecture to its config.json, with ``more`` keys."""

    def config(architecture, **more):
        known = known_families()[architecture].keys
        own = {name: value for name, value in _OWN_SIZES.items() if name in known}
        return {**_SIZES, **own, **more, "architectures": [architecture]}

    return config
