"""The expert layers of a mixture of experts, and their names in a family's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from kiln.engine.layers.activation import Activation
from kiln.engine.layers.mlp import GATES
from kiln.engine.layers.router import Routing
from kiln.engine.models.fields import Fields
from kiln.jit_kernels.ops.moe.functions import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint that has all experts of a layer as one tensor stores their matrices.

    Gate and up are one matrix, by default all outputs of gate and then those of up.
    """

    in_out: bool = False  # [experts, inputs, outputs] instead of [experts, outputs, inputs]
    alternating: bool = False  # an output of gate and one of up in turns


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The tensor names of a feed-forward layer with experts in a checkpoint.

    ``layer`` is the prefix of the others. ``raw_choice_bias``: the name of the choice bias in a
    state dict of transformers, if checkpoints have another; there ``layer`` is "mlp.".
    """

    layer: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router: str = "gate"
    choice_bias: str = "gate.e_score_correction_bias"
    raw_choice_bias: str = ""
    shared: str = "shared_expert"
    shared_gate: str = "shared_expert_gate"
    layout: Layout = Layout()


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward layers with experts, and how a token is routed to some of them.

    ``choice_bias``: the shape of the router's choice bias, () without one. ``router_in_float32``:
    its products and weights, whatever the model's dtype. ``shared_gate``: whether the shared expert
    is scaled by a sigmoid. ``weighs_inputs``: as in SparseMLP.
    """

    num_experts: int
    intermediate_size: int  # of one expert
    layers: tuple[bool, ...]  # whether each layer has experts; the others are dense
    routing: Routing
    router_bias: bool = False
    router_in_float32: bool = False
    choice_bias: tuple[int, ...] = ()
    activation: Activation = Activation()
    biases: bool = False  # of each expert's projections
    weighs_inputs: bool = False
    shared_size: int = 0  # intermediate size of the shared expert; 0: none
    shared_gate: bool = True
    names: ExpertNames = ExpertNames()

    @property
    def top_k(self) -> int:
        """How many experts a token is routed to."""
        return self.routing.top_k


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
    activation = fields.text("hidden_act", "silu")
    if activation not in GATES:
        raise fields.error("hidden_act", f"Kiln supports {', '.join(GATES)}")
    return Experts(
        num_experts=num_experts,
        intermediate_size=fields.count(size),
        layers=layers or (True,) * fields.count("num_hidden_layers"),
        routing=Routing(top_k, renormalise=renormalise),
        activation=Activation(activation),
        shared_size=shared_size,
        names=names,
    )


def read_groups(fields: Fields, experts: Experts) -> tuple[int, int]:
    """Read ``n_group`` and ``topk_group``, of which one or none means no groups.

    Raises ModelError unless the kept groups hold enough experts.
    """
    count, kept = fields.count("n_group", 1), fields.count("topk_group", 1)
    size, left = divmod(experts.num_experts, count)
    if count > MAX_GROUPS or left:
        raise fields.error(
            "n_group", f"want a divisor of {experts.num_experts} experts, at most {MAX_GROUPS}"
        )
    if kept > count:
        raise fields.error("topk_group", f"want at most {count} (n_group)")
    if size < 2 and count > 1 and not experts.routing.by_largest:
        raise fields.error("n_group", "groups are ranked by two experts, but have only one")
    if experts.top_k > kept * size:
        raise fields.error("topk_group", f"want groups of {experts.top_k} experts or more in total")
    return count, kept


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Return which layers have experts, by Qwen's decoder_sparse_step and mlp_only_layers.

    Raises ModelError.
    """
    step, dense = fields.count("decoder_sparse_step", 1), fields.counts("mlp_only_layers")
    num_layers = fields.count("num_hidden_layers")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
