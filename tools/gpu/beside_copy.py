"""Compare decode attention with a copy of the same number of bytes.

A launch that moves 32 MiB is so short that its start and end reduce its bandwidth below that of a
copy of gigabytes. A copy of the same size has the same overhead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gpu.pace import Pace
from kiln.jit_kernels.bench.ceilings import Ceilings, measure_ceilings, work_on
from kiln.jit_kernels.bench.copies import bytes_held, copies_of, num_copies
from kiln.jit_kernels.bench.timing import time_side_by_side
from kiln.jit_kernels.declare.arch import gpu
from kiln.jit_kernels.declare.spec import KernelSpec, Sizes, Variant
from kiln.jit_kernels.launch import launch
from kiln.jit_kernels.ops.attention_decode.splits import Shape, split_rule
from kiln.jit_kernels.registry import find_spec

Row = dict[str, Any]
_SIZES = [  # (requests, keys per request), 8 KV heads: 32, 64, 128 and 256 MiB of keys and values
    *[(1, 8192), (8, 1024), (1, 16384), (2, 8192), (4, 4096), (8, 2048)],
    *[(1, 32768), (2, 16384), (4, 8192), (64, 1024), (8, 8192)],
]
_FEWER_HEADS = [  # (KV heads on one of 2, 4 or 8 GPUs, requests, keys): long contexts
    *[(4, 1, 32768), (4, 4, 32768), (4, 16, 32768)],
    *[(2, 1, 65536), (2, 4, 65536), (2, 16, 32768)],
    *[(1, 1, 131072), (1, 4, 65536), (1, 16, 65536), (1, 64, 8192)],
]
_LARGER_GROUPS = [(1, 8192), (8, 1024), (1, 16384), (2, 8192)]  # 8 KV heads with 8 heads each
_OF_BYTES = [  # (requests, keys per request), 8 KV heads, fp8 pools: 32, 64, 128 MiB and more
    *[(2, 8192), (8, 2048), (1, 32768), (2, 16384)],
    *[(64, 1024), (8, 8192), (64, 2048), (64, 8192)],
]
_TIMES_L2 = 16  # bytes of all copies, in L2 sizes


def decode_beside_copy(args: argparse.Namespace) -> list[Row]:
    """Return one row per size, head_dim 128: microseconds, and shares of bandwidths.

    With 8 KV heads the group is 4 or 8; with fewer KV heads it is 8.
    """
    spec, ceilings = find_spec("paged_attention"), measure_ceilings("cuda")
    sizes = [
        *[_sizes(2, 8, *one) for one in _SIZES],
        *[{**_sizes(2, 8, *one), "group": 8} for one in _LARGER_GROUPS],
        *[_sizes(2, *one) for one in _FEWER_HEADS],
        *[_sizes(1, 8, *one) for one in _OF_BYTES],
    ]

    def rows_of(one: Sizes) -> Iterable[Row]:
        free = torch.cuda.mem_get_info()[0]
        kv_t = "kiln::e4m3" if one["kv_bytes"] == 1 else "SCALAR_T"
        variant = next(spec.variants({**spec.bench_needs, "kv_t": kv_t}))
        return [beside_copy(spec, variant, one, ceilings, "cuda", launch, free)]

    return Pace(args, seconds=50).rows(sizes, _name, rows_of)


def _sizes(kv_bytes: int, kv_heads: int, requests: int, context: int) -> Sizes:
    rule = split_rule(Shape(128, kv_bytes), kv_heads, gpu(0))
    return {
        "kv_bytes": kv_bytes,
        "kv_heads": kv_heads,
        "group": 4 if kv_heads == 8 else 8,
        "most": rule.most,
        "split": rule.blocks,
        "few": rule.few,
        "longer": rule.longer,
        "requests": requests,
        "context": context,
    }


def _name(sizes: Sizes) -> str:
    heads = sizes["kv_heads"]
    of = "" if heads == 8 else f" of {heads} KV head{'s' * (heads > 1)}"
    of += ", groups of 8" * (heads == 8 and sizes["group"] == 8)
    return f"{sizes['requests']} x {sizes['context']}{of}{' in fp8' * (sizes['kv_bytes'] == 1)}"


def beside_copy(
    spec: KernelSpec,
    variant: Variant,
    sizes: Sizes,
    ceilings: Ceilings,
    device: str,
    run: Callable[[KernelSpec, Sequence[Any]], None],
    free_bytes: int,
) -> Row:
    """Time a kernel and a copy of as many bytes in turn, on cold inputs; return both times."""
    first, cost = spec.make_arguments(variant, sizes, device), spec.cost(variant, sizes)
    count = num_copies(cost.bytes, bytes_held(first), ceilings.l2_bytes, free_bytes)
    cases = copies_of(first, count)
    pairs = max(count, _TIMES_L2 * ceilings.l2_bytes // cost.bytes)
    read = [torch.randn(cost.bytes // 8, device=device) for _ in range(pairs)]
    written = [torch.empty_like(x) for x in read]
    work = work_on(device)
    times = time_side_by_side(
        {
            "kernel": work([lambda case=case: run(spec, case) for case in cases]),
            "copy": work(
                [
                    lambda x=x, y=y: torch.mul(x, 1.0, out=y)
                    for x, y in zip(read, written, strict=True)
                ]
            ),
        }
    )
    kernel, copy = times["kernel"].median_us, times["copy"].median_us
    floor = ceilings.floor_us(cost)
    return {
        "sizes": _name(sizes),
        "mib": round(cost.bytes / 2**20, 1),
        "kernel_us": round(kernel, 2),
        "copy_us": round(copy, 2),
        "of_such_a_copy": round(copy / kernel, 3),
        "of_the_copy_rate": round(floor / kernel, 3),
        "such_a_copy_of_that_rate": round(floor / copy, 3),
    }
