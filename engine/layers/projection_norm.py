"""Norms over all of a token's queries, and over all its keys, before the split into heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kiln.engine.distributed.group import Group, group_named
from kiln.engine.layers.norm import RMSNorm, check_same_form
from kiln.engine.layers.opaque import opaque_operator


def _normalise(
    qkv: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    round_once: bool,
    group: str,
    key_copies: int,
) -> None:
    """Replace the query columns of qkv, and the key columns, by their norms."""
    weights = query_weight, key_weight
    sizes = [len(weight) for weight in weights]
    parts = qkv[:, : sum(sizes)].split(sizes, dim=1)
    if not group:
        for part, weight in zip(parts, weights, strict=True):
            factors = (weight, eps, weight_offset, round_once)
            torch.ops.kiln.rms_norm.default(part, part, *factors)
        return
    means = _mean_squares(parts, group_named(group), key_copies)
    scales = means.add_(eps).rsqrt_().split(1, dim=1)
    for part, weight, scale in zip(parts, weights, scales, strict=True):
        normal = part * scale  # float32, as the scale is
        if round_once or weight_offset:
            part.copy_(normal.mul_(weight.float() + weight_offset))
        else:
            part.copy_(normal.to(part.dtype).mul_(weight))


def _mean_squares(parts: tuple[torch.Tensor, ...], group: Group, key_copies: int) -> torch.Tensor:
    """Return the means over the columns of all ranks, [num_tokens, 2]: of queries, of keys."""
    query, key = parts
    means = query.new_zeros((query.shape[0], 2), dtype=torch.float32)
    torch.mean(query.float().square(), 1, out=means[:, 0])
    if group.rank % key_copies == 0:  # else the rank before has the same key head, and adds it
        torch.mean(key.float().square(), 1, out=means[:, 1])
    group.all_reduce(means)
    means /= group.size
    means[:, 1] *= key_copies
    return means


opaque_operator(
    "normalise_projection(Tensor(a!) qkv, Tensor query_weight, Tensor key_weight, float eps, "
    "float weight_offset, bool round_once, str group, int key_copies) -> ()",
    _normalise,
)


@dataclass(frozen=True, slots=True)
class ProjectionNorm:
    """Norms over all queries, and over all keys, of a projection: as in OLMo-2 and MiniMax-M2.

    ``query`` has a weight for each query column of the projection, ``key`` for each key column.
    With ranks these are the rank's own, and the mean of squares is that over the columns of all
    ranks of ``group``. ``key_copies``: how many ranks in a row have the same key head. Raises
    ValueError if the norms differ in more than their weights.
    """

    query: RMSNorm
    key: RMSNorm
    group: str = ""
    key_copies: int = 1

    def __post_init__(self) -> None:
        check_same_form("a norm over the whole projection", self.query, self.key)

    def __call__(self, qkv: torch.Tensor) -> None:
        """Normalise queries and keys of qkv, in place.

        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], queries first, then keys.
        """
        torch.ops.kiln.normalise_projection.default(
            qkv,
            self.query.weight,
            self.key.weight,
            self.query.eps,
            self.query.weight_offset,
            self.query.round_once,
            self.group,
            self.key_copies,
        )
