"""The expert layers of a mixture of experts, and their names in a family's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.engine.models.fields import Fields
from kiln.jit_kernels.ops.moe.functions import MAX_EXPERTS, MAX_TOP_K


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The tensor names of a feed-forward layer with experts in a checkpoint."""

    layer: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward layers with experts; each token is routed to ``top_k`` of them."""

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    renormalise: bool  # normalize the weights of a token's experts to a sum of 1
    layers: tuple[bool, ...]  # whether each layer has experts; the others are dense
    shared_size: int = 0  # intermediate size of the gated shared expert; 0: none
    names: ExpertNames = ExpertNames()


def read_experts(
    fields: Fields,
    count: str,
    size: str,
    *,
    layers: tuple[bool, ...] = (),
    renormalise: bool = True,
    shared_size: int = 0,
    names: ExpertNames = ExpertNames(),
) -> Experts:
    """Read the fields common to all mixtures; ``count`` and ``size`` name fields of config.json.

    ``layers`` empty: every layer has experts. Raises ModelError.
    """
    num_experts, top_k = fields.count(count), fields.count("num_experts_per_tok")
    if num_experts > MAX_EXPERTS:
        raise fields.error(count, f"want at most {MAX_EXPERTS}")
    if top_k > min(num_experts, MAX_TOP_K):
        raise fields.error("num_experts_per_tok", f"want at most {min(num_experts, MAX_TOP_K)}")
    if fields.text("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", "experts support only silu")
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=fields.count(size),
        renormalise=renormalise,
        layers=layers or (True,) * fields.count("num_hidden_layers"),
        shared_size=shared_size,
        names=names,
    )


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Return which layers have experts, by Qwen's decoder_sparse_step and mlp_only_layers.

    Raises ModelError.
    """
    step, dense = fields.count("decoder_sparse_step", 1), fields.counts("mlp_only_layers")
    num_layers = fields.count("num_hidden_layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
