"""From the qkv projection to attention: norms, rotation, and the store to the KV pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kiln.engine.attention.layer import AttentionLayer
from kiln.engine.kv.pool import KVPool
from kiln.engine.layers.norm import check_same_form
from kiln.jit_kernels.declare.spec import KernelSpec, Needs
from kiln.jit_kernels.implementations import decision, may_run_kernel
from kiln.jit_kernels.ops.kv.checks import check_rope_store, serves
from kiln.jit_kernels.ops.kv.spec import ROPE_STORE, variant_of
from kiln.jit_kernels.ops.norm.spec import RMS_NORM
from kiln.jit_kernels.ops.rotary.spec import APPLY_ROTARY
from kiln.jit_kernels.torch_ops import call

RotateAndStore = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
"""(positions, slots, query, key, value) -> the query, normalised and rotated.

positions, slots: [num_tokens] int64; query: [num_tokens, num_heads, head_dim]; key, value:
[num_tokens, num_kv_heads, head_dim]. Query and key may be overwritten.
"""


def choose_store(layer: AttentionLayer, pool: KVPool, dtype: torch.dtype) -> RotateAndStore:
    """Return the fused kernel if it supports the layer's sizes, else separate operations.

    Both give the same results. Raises ValueError and TypeError if the kernel cannot write the pool,
    ValueError if the layer has scales that the pool does not take, or norms that differ.
    """
    keys, values = pool.views(layer.index)
    if keys.dtype != torch.float8_e4m3fn and (layer.k_scale, layer.v_scale) != (1.0, 1.0):
        raise ValueError(
            f"attention layer {layer.index}: k_scale is {layer.k_scale} and v_scale "
            f"{layer.v_scale}, but a KV pool of {keys.dtype} takes no scales: want 1.0"
        )
    norm, heads = _norm_of(layer), layer.shape
    table = keys.new_empty((0, 0), dtype=torch.float32)  # rotates nothing
    if layer.rotary is not None:
        table = layer.rotary.table
    if not is_one_launch(keys, dtype, table.shape[1]):
        return SeparateOperations(layer, pool)
    query, key = (
        keys.new_empty((0, count, heads.head_dim), dtype=dtype)
        for count in (heads.num_heads, heads.num_kv_heads)
    )
    nowhere = torch.empty(0, dtype=torch.int64, device=keys.device)
    empty = ROPE_STORE.parameters.Arguments(
        out=query,
        key_pool=keys,
        value_pool=values,
        query=query,
        key=key,
        value=key,
        positions=nowhere,
        cos_sin_table=table,
        slot_mapping=nowhere,
        **norm,
        k_scale=layer.k_scale,
        v_scale=layer.v_scale,
    )
    check_rope_store(empty)  # everything but the step's tensors
    return OneLaunch(empty._asdict())


def _norm_of(layer: AttentionLayer) -> dict[str, Any]:
    """Return rope_store's arguments of the layer's norms. Raises ValueError if they differ."""
    query, key = layer.query_norm, layer.key_norm
    if query is None or key is None:
        none = {"eps": 0.0, "weight_offset": 0.0, "round_once": False}
        return {"query_weight": None, "key_weight": None, **none}
    check_same_form(f"attention layer {layer.index}", query, key)
    return {"query_weight": query.weight, "key_weight": key.weight, **query.form}


def is_one_launch(pool: torch.Tensor, dtype: torch.dtype, rotary_dim: int) -> bool:
    """Return whether one kernel supports heads of this dtype and this pool.

    With torch's operations, separate operators are faster than one operator for all parts.
    """
    if not serves(pool.shape[-1], rotary_dim):
        return False
    variant = variant_of(dtype, pool.dtype)
    return decision(ROPE_STORE, variant, pool.device).implementation != "torch"


def store_kernels(
    head_dim: int, rotary_dims: Collection[int], norms: bool, device: torch.device, needs: Needs
) -> list[KernelSpec]:
    """Return the operators that what ``choose_store`` returns can call for a model.

    ``rotary_dims``: how many dimensions of a head the layers rotate; 0: layers without positions.
    ``norms``: whether queries and keys are normalised.
    """
    fused = {dim for dim in rotary_dims if serves(head_dim, dim)}
    apart = {*rotary_dims} - (fused if may_run_kernel(ROPE_STORE, device, needs) else set())
    return [
        *([ROPE_STORE] if fused else []),
        *([APPLY_ROTARY] if any(apart) else []),
        *([RMS_NORM] if norms and apart else []),
    ]


@dataclass(frozen=True, slots=True)
class OneLaunch:
    """Norms, rotation and store in one launch of rope_store."""

    arguments: Mapping[str, Any]  # checked; each step replaces its own

    def __call__(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Overwrite the query and return it; the key in qkv is unchanged."""
        step = {
            "out": query,
            "query": query,
            "key": key,
            "value": value,
            "positions": positions,
            "slot_mapping": slots,
        }
        call(ROPE_STORE, **{**self.arguments, **step})
        return query


@dataclass(frozen=True, slots=True)
class SeparateOperations:
    """Norms, rotation and store as separate operations."""

    layer: AttentionLayer
    pool: KVPool

    def __call__(
        self,
        positions: torch.Tensor,
        slots: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> torch.Tensor:
        """Return the query: in qkv, or in a new tensor if the layer has norms."""
        layer = self.layer
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        if layer.rotary is not None:
            layer.rotary(positions, query, key)
        self.pool.store(layer.index, slots, key, value, layer.k_scale, layer.v_scale)
        return query
