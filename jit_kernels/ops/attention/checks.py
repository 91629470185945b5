"""Checks of the arguments of the public attention functions; errors name the argument."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.ops.attention.variants import KV_BLOCK, MOST_GROUP
from kiln.jit_kernels.ops.attention.visible import MOST_WINDOW
from kiln.jit_kernels.ops.shared.shapes import check_dtype, check_shape

_ALIGNED = 16  # bytes


def checked(function: str, **arguments: Any) -> SimpleNamespace:
    """Check the arguments of a public function and return them, ready for a launch.

    If ``out`` is None, it is allocated; if ``lse`` is None, it is empty. The rows of the query are
    aligned, if necessary by a copy. Raises what check_attention does.
    """
    a = SimpleNamespace(**arguments)
    a.out = a.query.new_empty(a.query.shape) if a.out is None else a.out
    a.lse = torch.empty(0, device=a.query.device) if a.lse is None else a.lse
    check_attention(function, a)
    a.query = a.query if has_aligned_rows(a.query) else a.query.contiguous()
    return a


def check_attention(function: str, a: Arguments) -> None:
    """Reject arguments of paged_attention or paged_prefill that the kernels do not support.

    They include out and lse. Raises ValueError for shapes and numbers, TypeError for dtypes.
    """
    query, table, out = a.query, a.block_table, a.out
    if query.dim() != 3 or table.dim() != 2:
        raise ValueError(
            f"{function}: query is {list(query.shape)}, block_table {list(table.shape)}; want "
            f"[num_tokens, num_heads, head_dim] and [num_requests, max_blocks]"
        )
    check_dtype(function, query=query, out=out)
    check_shape(function, "out", out, query.shape)
    if not out.is_contiguous():
        raise ValueError(f"{function}: out has strides {out.stride()}, want contiguous")
    _check_pool(function, "key_pool", a.key_pool, query)
    _check_pool(function, "value_pool", a.value_pool, query)
    check_shape(function, "value_pool", a.value_pool, a.key_pool.shape)
    heads, kv_heads = query.shape[1], a.key_pool.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{function}: {heads} query heads are no multiple of {kv_heads} KV heads")
    if heads > MOST_GROUP * kv_heads:
        raise ValueError(
            f"{function}: {heads} query heads share {kv_heads} KV heads; at most {MOST_GROUP} may "
            f"share one"
        )
    requests = table.shape[0]
    _check_dense(function, "block_table", table, tuple(table.shape), torch.int32)
    _check_dense(function, "seq_lens", a.seq_lens, (requests,), torch.int32)
    _check_dense(function, "cu_seqlens_q", a.cu_seqlens_q, (requests + 1,), torch.int32)
    if a.sinks is not None:
        _check_dense(function, "sinks", a.sinks, (heads,), torch.float32)
    if a.lse.numel():
        _check_dense(function, "lse", a.lse, tuple(query.shape[:2]), torch.float32)
    _check_numbers(function, a)


def _check_numbers(function: str, a: Arguments) -> None:
    # Prefill computes a row's largest logit before it applies the scale, which must be positive.
    for name, value in (("scale", a.scale), ("k_scale", a.k_scale)):
        if not 0 < value < math.inf:
            raise ValueError(f"{function}: {name} {value}, want a finite number above 0")
    if abs(a.window) > MOST_WINDOW:
        raise ValueError(
            f"{function}: window {a.window}, want 0 for none, a number of keys up to "
            f"{MOST_WINDOW}, or minus the size of a chunk"
        )
    if not 0 <= a.soft_cap < math.inf:
        raise ValueError(
            f"{function}: soft_cap {a.soft_cap}, want 0 for none or a finite number above 0"
        )


def _check_dense(
    function: str, name: str, tensor: torch.Tensor, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_shape(function, name, tensor, sizes)
    if tensor.dtype != dtype:
        raise TypeError(f"{function}: {name} is {tensor.dtype}, want {dtype}")
    if not tensor.is_contiguous() and (tensor.dim() < 2 or tensor.stride(-1) != 1):
        raise ValueError(f"{function}: {name} has strides {tensor.stride()}, want dense rows")


def _check_pool(function: str, name: str, pool: torch.Tensor, query: torch.Tensor) -> None:
    if pool.dim() != 4 or pool.shape[2] != KV_BLOCK or pool.shape[3] != query.shape[2]:
        raise ValueError(
            f"{function}: {name} is {list(pool.shape)}, want [num_blocks, num_kv_heads, "
            f"{KV_BLOCK}, {query.shape[2]}]"
        )
    if pool.dtype not in (query.dtype, torch.float8_e4m3fn):
        raise TypeError(
            f"{function}: {name} is {pool.dtype}, want {query.dtype} or torch.float8_e4m3fn"
        )
    if pool.device != query.device:
        raise ValueError(f"{function}: {name} is on {pool.device} but query on {query.device}")
    if not has_aligned_rows(pool):
        raise ValueError(
            f"{function}: {name} has strides {pool.stride()}, want dense rows that start at "
            f"multiples of {_ALIGNED} bytes"
        )


def has_aligned_rows(x: torch.Tensor) -> bool:
    """Return whether the last dimension is dense and each row starts at a multiple of 16 bytes."""
    if not x.numel():
        return True
    step = _ALIGNED // x.element_size()
    even = all(
        stride % step == 0 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        if size > 1
    )  # fmt: skip
    return x.stride(-1) == 1 and even and x.data_ptr() % _ALIGNED == 0
