"""Attention of other libraries: torch's flash backend and FlashInfer.

Both need a preparation that their time excludes: torch a dense copy of the keys and values,
FlashInfer a plan computed on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from kiln.jit_kernels.bench.timing import Call
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import KernelSpec

PAGED = ("paged_attention", "paged_prefill")  # the operators that these implement
_WORKSPACE_BYTES = 128 << 20  # as in FlashInfer's examples


def sdpa_form(spec: KernelSpec) -> Callable[[Arguments], Call]:
    """Return torch's scaled_dot_product_attention, flash backend, for requests of one length."""
    return _sdpa_call


def _sdpa_call(a: Arguments) -> Call:
    tokens = {last - first for first, last in pairwise(a.cu_seqlens_q.tolist())}
    lengths = set(a.seq_lens.tolist())
    if len(tokens) != 1 or len(lengths) != 1 or a.window or a.soft_cap or a.k_scale != 1:
        raise ValueError("torch's flash backend needs equal lengths, no window, no cap")
    (queries,), (length,) = tokens, lengths
    keys, values = (_dense(pool, a, length) for pool in (a.key_pool, a.value_pool))
    query = a.query.unflatten(0, (-1, queries)).transpose(1, 2)  # [requests, heads, queries, dim]
    if query.shape[1] != keys.shape[1] and queries not in (1, length):
        # With the lower-right mask torch does not repeat the KV heads.
        keys, values = (
            x.repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for x in (keys, values)
        )
    more: dict[str, Any] = {"scale": a.scale}
    if queries == length:
        more |= {"is_causal": True, "enable_gqa": True}
    elif queries == 1:
        more |= {"enable_gqa": True}
    else:
        more |= {"attn_mask": causal_lower_right(queries, length)}

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(query, keys, values, **more)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def _dense(pool: torch.Tensor, a: Arguments, length: int) -> torch.Tensor:
    """Return a pool's rows of all requests, [requests, kv_heads, length, head_dim]."""
    ids = a.block_table[:, : -(-length // pool.shape[2])].long()
    return pool[ids].transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()


def flashinfer_form(spec: KernelSpec, flashinfer: ModuleType) -> Callable[[Arguments], Call]:
    """Return FlashInfer's paged attention; all copies of a call share one plan."""
    planned: dict[tuple[int, ...], Any] = {}

    def form(a: Arguments) -> Call:
        key = (*a.seq_lens.tolist(), -1, *a.cu_seqlens_q.tolist())
        if key not in planned:
            planned.clear()  # keep only the latest workspace
            make = _plan_decode if spec.name == "paged_attention" else _plan_prefill
            planned[key] = make(flashinfer, a)
        wrapper, pools = planned[key], (a.key_pool, a.value_pool)

        def call() -> torch.Tensor:
            result: torch.Tensor = wrapper.run(a.query, pools)
            return result

        return call

    return form


def _pages(a: Arguments) -> dict[str, torch.Tensor]:
    """Return the block table in FlashInfer's form: flat ids, offsets, lengths of last pages."""
    block = a.key_pool.shape[2]
    counts = (a.seq_lens + block - 1) // block
    rows = [row[:count] for row, count in zip(a.block_table, counts.tolist(), strict=True)]
    ends = F.pad(counts.cumsum(0), (1, 0)).int()
    last = (a.seq_lens - 1) % block + 1
    return {"indptr": ends, "indices": torch.cat(rows).int(), "last_page_len": last.int()}


def _shape(a: Arguments) -> dict[str, Any]:
    if a.window < 0:
        raise ValueError("FlashInfer has no chunks")
    return {
        "num_qo_heads": a.query.shape[1],
        "num_kv_heads": a.key_pool.shape[1],
        "page_size": a.key_pool.shape[2],
        "window_left": a.window - 1,  # -1: all
        "logits_soft_cap": a.soft_cap or None,
        "q_data_type": a.query.dtype,
        "kv_data_type": a.key_pool.dtype,
        "sm_scale": a.scale * a.k_scale,
    }


def _workspace(a: Arguments) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=a.query.device)


def _plan_decode(flashinfer: ModuleType, a: Arguments) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(a), "HND", use_tensor_cores=a.query.shape[1] > a.key_pool.shape[1]
    )
    wrapper.plan(**_pages(a), **_shape(a), head_dim=a.query.shape[2])
    return wrapper


def _plan_prefill(flashinfer: ModuleType, a: Arguments) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(a), "HND")
    pages = {f"paged_kv_{name}": tensor for name, tensor in _pages(a).items()}
    dim = a.query.shape[2]
    wrapper.plan(qo_indptr=a.cu_seqlens_q, **pages, **_shape(a), head_dim_qk=dim, causal=True)
    return wrapper


ATTENTION = MappingProxyType(
    {name: {"flashinfer": ("flashinfer", flashinfer_form)} for name in PAGED}
)
