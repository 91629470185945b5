"""The public functions of mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kiln.jit_kernels.declare.spec import SCALARS
from kiln.jit_kernels.ops.activation.functions import silu_and_mul
from kiln.jit_kernels.ops.moe.reference import align_capacity
from kiln.jit_kernels.ops.moe.spec import ALIGN_TOKENS, ROUTE_TOKENS, variant_of
from kiln.jit_kernels.ops.shared.shapes import check_shape, takes_arrays
from kiln.jit_kernels.torch_ops import call

MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS = 512, 32, 32
CALLED = (ROUTE_TOKENS, ALIGN_TOKENS)  # by route_tokens and sum_of_experts


GroupedProduct = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [num_rows, in], ends [num_experts], experts [num_rows]) -> [num_rows, out]: each row times
the weights of its expert. The rows are sorted by expert, and ``ends`` says where each expert's end;
those behind the last may give anything."""


class Aligned(NamedTuple):
    """Token-expert pairs sorted by expert; all int32.

    ``sorted_token_ids`` [capacity]: indices into ids.flatten(), or its length for padding.
    ``expert_ids`` [blocks]: the expert of each block, -1 after the last. ``expert_ends``
    [num_experts]: the end of each expert's run. ``num_tokens_post_padded`` [1]: the last end.
    """

    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_tokens_post_padded: torch.Tensor
    expert_ends: torch.Tensor


@takes_arrays
def route_tokens(  # noqa: PLR0913 (what the routers of many families differ in)
    logits: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    bias: torch.Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    renormalise: bool = True,
    factor: float = 1.0,
    by_largest: bool = False,
    least_sum: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [num_tokens, top_k] float32 and expert ids [num_tokens, top_k] int32.

    logits: [num_tokens, num_experts]; bias: [num_experts] float32, added to the scores for the
    choice only. ``scoring`` is "softmax" (Mixtral, Qwen) or "sigmoid" (DeepSeek-V3). ``groups`` =
    (n, kept): experts form n groups of neighbours; a group is ranked by the sum of its two largest
    choices, or with ``by_largest`` by the largest alone (DeepSeek-V2), and only experts of the
    first ``kept`` groups are eligible. The largest choice is first; of equal ones, the lower id.
    Ids are distinct and in range for any logits: a NaN counts as -inf, and an expert at -inf has
    weight 0. ``renormalise`` divides the weights by their sum + 1e-20, or by ``least_sum`` if that
    is more (Ernie-4.5); ``factor`` multiplies them. Raises ValueError on a wrong shape or number,
    TypeError on a wrong dtype.
    Sources: https://arxiv.org/abs/2412.19437 section 2.1.2, https://arxiv.org/abs/2405.04434
    section 2.2.2
    """
    num_groups, top_groups = groups
    if logits.dim() != 2 or logits.dtype not in SCALARS:
        raise TypeError(
            f"route_tokens: logits are {logits.dtype} {list(logits.shape)}; want two dimensions of "
            f"{', '.join(map(str, SCALARS))}"
        )
    tokens, experts = logits.shape
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"route_tokens: scoring {scoring!r}; want 'softmax' or 'sigmoid'")
    _check_counts(experts, top_k, groups, by_largest)
    if bias is not None:
        bias = _checked_bias(bias, logits)
    if not ROUTE_TOKENS.has_variant(variant_of(logits)):
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int32)
    call(
        ROUTE_TOKENS,
        weights=weights,
        ids=ids,
        logits=logits,
        bias=bias,
        num_groups=num_groups,
        top_groups=top_groups,
        by_largest=by_largest,
        sigmoid=scoring == "sigmoid",
        renormalise=renormalise,
        least_sum=least_sum,
        factor=factor,
    )
    return weights, ids


def _checked_bias(bias: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    check_shape("route_tokens", "bias", bias, logits.shape[1:])
    if bias.dtype != torch.float32 or bias.device != logits.device:
        raise TypeError(
            f"route_tokens: bias is {bias.dtype} on {bias.device}; want torch.float32 on "
            f"{logits.device}"
        )
    return bias.contiguous()


def _check_counts(experts: int, top_k: int, groups: tuple[int, int], by_largest: bool) -> None:
    num_groups, top_groups = groups
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"route_tokens: {experts} experts; want 1 to {MAX_EXPERTS}")
    if not 1 <= num_groups <= MAX_GROUPS or experts % num_groups:
        raise ValueError(
            f"route_tokens: {num_groups} groups of {experts} experts; want a divisor, at most "
            f"{MAX_GROUPS}"
        )
    size = experts // num_groups
    least = 1 if num_groups == 1 or by_largest else 2
    if not 1 <= top_groups <= num_groups or size < least:
        raise ValueError(
            f"route_tokens: keep {top_groups} of {num_groups} groups of {size}; want 1 to "
            f"{num_groups}, and groups of {least} or more"
        )
    if not 1 <= top_k <= min(MAX_TOP_K, top_groups * size):
        raise ValueError(
            f"route_tokens: top_k {top_k}; want 1 to {min(MAX_TOP_K, top_groups * size)}"
        )


@takes_arrays
def align_tokens(ids: torch.Tensor, num_experts: int, block_size: int) -> Aligned:
    """Return the token-expert pairs of ids sorted by expert, in runs of whole blocks.

    ids: [num_tokens, top_k] int32; a pair whose id is not in 0 .. num_experts-1 is left out, such
    as that of an expert on another GPU. An expert's pairs keep the order of the tokens, so that
    every run gives the same result. With a block_size of 1 nothing is padded, and ``expert_ends``
    are the offsets of a grouped matrix product. Raises ValueError and TypeError.
    """
    if ids.dtype != torch.int32:
        raise TypeError(f"align_tokens: ids are {ids.dtype}; want torch.int32")
    if not 1 <= num_experts <= MAX_EXPERTS or block_size < 1:
        raise ValueError(
            f"align_tokens: {num_experts} experts, blocks of {block_size}; want 1 to "
            f"{MAX_EXPERTS}, and 1 or more"
        )
    pairs = ids.numel()
    capacity = align_capacity(pairs, num_experts, block_size)
    if capacity > 2**30:
        raise ValueError(f"align_tokens: {capacity} places in total; want at most {2**30}")
    sizes = (capacity, capacity // block_size, 1, num_experts)
    aligned = Aligned(*(ids.new_empty(size) for size in sizes))
    call(ALIGN_TOKENS, **aligned._asdict(), ids=ids.contiguous(), block_size=block_size)
    return aligned


def moe_experts(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Return the sum over chosen experts of weight * w2 @ silu_and_mul(w1 @ x), in x's dtype.

    x: [num_tokens, hidden]; w1: [num_experts, 2 * intermediate, hidden], gate first; w2:
    [num_experts, hidden, intermediate]; weights, ids: [num_tokens, top_k] as route_tokens gives
    them. A pair whose id is out of range adds nothing. The products are torch's grouped_mm; the
    sum is float32, in the order of top_k. Raises ValueError on a wrong shape.
    """
    experts = w1.shape[0]
    check_shape("moe_experts", "w2", w2, (experts, x.shape[1], w1.shape[1] // 2))

    def grouped(w: torch.Tensor) -> GroupedProduct:
        return lambda rows, ends, of: F.grouped_mm(rows, w.transpose(1, 2), offs=ends)

    return sum_of_experts(x, grouped(w1), grouped(w2), experts, weights, ids)


def with_bias(product: GroupedProduct, bias: torch.Tensor | None) -> GroupedProduct:
    """Return a product that adds its expert's bias [num_experts, out] to each row."""
    if bias is None:
        return product

    def biased(rows: torch.Tensor, ends: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        return product(rows, ends, experts).add_(bias[experts])

    return biased


def sum_of_experts(
    x: torch.Tensor,
    gate_up: GroupedProduct,
    down: GroupedProduct,
    num_experts: int,
    weights: torch.Tensor,
    ids: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul,
    *,
    weighs_inputs: bool = False,
) -> torch.Tensor:
    """Do the same as moe_experts with any two products and any gated activation.

    With ``weighs_inputs`` the weights, rounded to x's dtype, multiply an expert's input instead of
    what it returns.
    """
    (tokens, hidden), top_k = x.shape, ids.shape[1]
    check_shape("moe_experts", "weights", weights, ids.shape)
    check_shape("moe_experts", "ids", ids, (tokens, top_k))
    if not ids.numel():
        return torch.zeros_like(x)
    aligned = align_tokens(ids, num_experts, 1)
    places = aligned.sorted_token_ids.long()  # after the last end: ids.numel(), which is padding
    inside = places < ids.numel()
    pairs = places.clamp(max=ids.numel() - 1)
    rows, ends = x[pairs // top_k], aligned.expert_ends
    if weighs_inputs:
        rows *= weights.flatten()[pairs, None].to(x.dtype)
    of = ids.flatten()[pairs].clamp(0, num_experts - 1)  # padding may have any expert
    middle = activation(gate_up(rows, ends, of))
    parts = down(middle, ends, of)
    # Rows outside all groups are undefined, maybe NaN: multiplying by 0 would not clear them.
    parts = torch.where(inside.unsqueeze(1), parts, 0.0).float()
    back = parts.new_zeros(ids.numel() + 1, hidden).index_copy_(0, places, parts)
    chosen = back[:-1].view(tokens, top_k, hidden)
    if not weighs_inputs:
        chosen = chosen * weights.unsqueeze(2)
    return chosen.sum(1).to(x.dtype)
