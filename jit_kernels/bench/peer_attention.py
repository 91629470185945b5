"""Attention of others: torch's flash backend on keys laid out beforehand, and FlashInfer.

Both get what Kiln's kernels do not need: torch a dense copy of the keys and values, FlashInfer a
plan made by the host. Neither is in their time.
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

from kiln.jit_kernels.attention.reference import Paged
from kiln.jit_kernels.parameters import Arguments
from kiln.jit_kernels.spec import KernelSpec
from kiln.jit_kernels.timing import Call

PAGED = ("paged_attention", "paged_prefill")  # the operators that these can stand in for
_WORKSPACE_BYTES = 128 << 20  # what FlashInfer's own examples give it
_FIELDS = (
    *("query", "key_pool", "value_pool", "block_table", "seq_lens", "cu_seqlens_q", "sinks"),
    *("scale", "window", "soft_cap", "k_scale", "v_scale"),
)


def sdpa_form(spec: KernelSpec) -> Callable[[Arguments], Call]:
    """Return torch's scaled_dot_product_attention, flash backend, for requests of one length."""
    return lambda a: _sdpa_call(_paged(a))


def _paged(a: Arguments) -> Paged:
    return Paged(*(getattr(a, field) for field in _FIELDS))


def _sdpa_call(case: Paged) -> Call:
    tokens = {last - first for first, last in pairwise(case.cu_seqlens_q.tolist())}
    lengths = set(case.seq_lens.tolist())
    if len(tokens) != 1 or len(lengths) != 1 or case.window or case.soft_cap or case.k_scale != 1:
        raise ValueError("torch's flash backend takes requests of one length, no window, no cap")
    (queries,), (length,) = tokens, lengths
    keys, values = (_dense(pool, case, length) for pool in (case.key_pool, case.value_pool))
    query = case.query.unflatten(0, (-1, queries)).transpose(
        1, 2
    )  # [requests, heads, queries, dim]
    if query.shape[1] != keys.shape[1] and queries not in (1, length):
        # The lower right mask reaches the kernel by a way that does not repeat the heads.
        keys, values = (
            x.repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for x in (keys, values)
        )
    more: dict[str, Any] = {"scale": case.scale}
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


def _dense(pool: torch.Tensor, case: Paged, length: int) -> torch.Tensor:
    """Return a pool's rows of all requests, [requests, kv_heads, length, head_dim]."""
    ids = case.block_table[:, : -(-length // pool.shape[2])].long()
    return pool[ids].transpose(1, 2).flatten(2, 3)[:, :, :length].contiguous()


def flashinfer_form(spec: KernelSpec, flashinfer: ModuleType) -> Callable[[Arguments], Call]:
    """Return FlashInfer's paged attention, planned once for all copies of a call."""
    planned: dict[tuple[int, ...], Any] = {}

    def form(a: Arguments) -> Call:
        case = _paged(a)
        key = (*case.seq_lens.tolist(), -1, *case.cu_seqlens_q.tolist())
        if key not in planned:
            planned.clear()  # a workspace of the last case is enough
            make = _plan_decode if spec.name == "paged_attention" else _plan_prefill
            planned[key] = make(flashinfer, case)
        wrapper, pools = planned[key], (case.key_pool, case.value_pool)

        def call() -> torch.Tensor:
            result: torch.Tensor = wrapper.run(case.query, pools)
            return result

        return call

    return form


def _pages(case: Paged) -> dict[str, torch.Tensor]:
    """Return the block table as FlashInfer wants it: ids in a row, ends, tokens of last pages."""
    block = case.key_pool.shape[2]
    counts = (case.seq_lens + block - 1) // block
    rows = [row[:count] for row, count in zip(case.block_table, counts.tolist(), strict=True)]
    ends = F.pad(counts.cumsum(0), (1, 0)).int()
    last = (case.seq_lens - 1) % block + 1
    return {"indptr": ends, "indices": torch.cat(rows).int(), "last_page_len": last.int()}


def _shape(case: Paged) -> dict[str, Any]:
    return {
        "num_qo_heads": case.query.shape[1],
        "num_kv_heads": case.key_pool.shape[1],
        "page_size": case.key_pool.shape[2],
        "window_left": case.window - 1,  # -1: all
        "logits_soft_cap": case.soft_cap or None,
        "q_data_type": case.query.dtype,
        "kv_data_type": case.key_pool.dtype,
        "sm_scale": case.scale * case.k_scale,
    }


def _workspace(case: Paged) -> torch.Tensor:
    return torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.query.device)


def _plan_decode(flashinfer: ModuleType, case: Paged) -> Any:
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(case), "HND", use_tensor_cores=case.query.shape[1] > case.key_pool.shape[1]
    )
    wrapper.plan(**_pages(case), **_shape(case), head_dim=case.query.shape[2])
    return wrapper


def _plan_prefill(flashinfer: ModuleType, case: Paged) -> Any:
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(case), "HND")
    pages = {f"paged_kv_{name}": tensor for name, tensor in _pages(case).items()}
    dim = case.query.shape[2]
    wrapper.plan(qo_indptr=case.cu_seqlens_q, **pages, **_shape(case), head_dim_qk=dim, causal=True)
    return wrapper


ATTENTION = MappingProxyType(
    {name: {"flashinfer": ("flashinfer", flashinfer_form)} for name in PAGED}
)
