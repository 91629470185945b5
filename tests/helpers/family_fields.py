"""Fields without which a family is refused, for tests of all families."""

from __future__ import annotations

from typing import Any


def needed_fields(architecture: str, num_layers: int) -> dict[str, Any]:
    """Return fields of config.json for a model of ``num_layers`` layers."""
    if architecture == "GraniteMoeHybridForCausalLM":  # served without experts and state layers
        kinds = ["attention"] * num_layers
        return {"num_local_experts": 0, "layer_types": kinds, "position_embedding_type": "rope"}
    return {"head_dim": 128} if architecture == "Glm4MoeForCausalLM" else {}  # 96 heads
