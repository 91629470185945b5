"""The spec of the kernel that turns weights of few bits back to floats."""

from __future__ import annotations

from types import MappingProxyType

import torch

from kiln.jit_kernels.declare.parameters import (
    Arguments,
    declare,
    derived,
    inputs,
    operator_only,
    optional,
    outputs,
    values,
)
from kiln.jit_kernels.declare.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Results,
    Sizes,
    Variant,
)
from kiln.jit_kernels.ops.dequantize import cases
from kiln.jit_kernels.ops.dequantize.reference import ROW_BLOCK, dequantize_reference
from kiln.jit_kernels.ops.shared.four_bits import CHUNK
from kiln.jit_kernels.torch_ops import define

ELEMENTS = 8  # of a piece; they divide a row
_THREADS, _PIECES = 128, 4  # of a block, of a thread
_MOST_PIECES = 2**31 - 1
# Models in float32 are no users of quantised weights but tests: they take the reference.
KERNEL_DTYPES = MappingProxyType(
    {dtype: name for dtype, name in SCALARS.items() if dtype != torch.float32}
)


def code_of(codes: torch.Tensor, scales: torch.Tensor, d: int) -> str:
    """Return the kind of codes [experts, all_rows, ..] of rows of ``d``."""
    if codes.dtype != torch.uint8:
        return "S8" if codes.dtype == torch.int8 else "E4M3"
    if scales.dtype == torch.uint8:
        return "E2M1"
    return "U8" if codes.shape[2] == d else "U4"


def _bind(a: Arguments) -> Bound:
    experts, rows, d = a.out.shape
    pieces = experts * rows * (d // ELEMENTS)
    if d % ELEMENTS or pieces > _MOST_PIECES:
        raise ValueError(
            f"dequantize: {experts} x {rows} rows of {d}; want a multiple of {ELEMENTS}, and at "
            f"most {_MOST_PIECES} times as many elements"
        )
    code = code_of(a.codes, a.scales, d)
    if cases.BITS[code] == 4 and d % CHUNK:
        raise ValueError(f"dequantize: rows of {d} codes of 4 bits; want a multiple of {CHUNK}")
    all_rows, (_, scale_rows, columns) = a.codes.shape[1], a.scales.shape
    numbers = {
        "pieces": pieces,
        "d": d,
        "rows": max(rows, 1),
        "all_rows": all_rows,
        "rows_log2": 0 if scale_rows == all_rows else ROW_BLOCK.bit_length() - 1,
        "scale_rows": scale_rows,
        "scale_columns": columns,
        "group": a.group_size,
        "group_log2": _log2(a.group_size, d),
    }
    variant = {"scalar_t": SCALARS[a.out.dtype], "code": code}
    return Bound(variant, {"rows": experts * rows, "d": d}, numbers)


def _log2(group: int, d: int) -> int:
    """Return by how much to shift an input to find its group, or -1 if a shift does not."""
    if group >= d:
        return 31
    return group.bit_length() - 1 if group.bit_count() == 1 else -1


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    pieces = sizes["rows"] * (sizes["d"] // ELEMENTS)
    blocks = -(-pieces // (_THREADS * _PIECES))
    return LaunchGeometry((max(blocks, 1), 1, 1), (_THREADS, 1, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    """Count what is written, and the tensors that are read, with rows that are not."""
    code, experts = variant["code"], sizes.get("experts", 1)
    d = sizes["d"]
    all_rows, scale_rows, columns = cases.shapes(sizes)
    scale = 1 if code == "E2M1" else 4 + (2 if cases.has_zeros(variant, sizes) else 0)
    order = 4 * experts * d if sizes.get("order") else 0
    codes = experts * all_rows * d * cases.BITS[code] // 8
    written = sizes["rows"] * d * DTYPES[variant["scalar_t"]].itemsize
    scales = experts * scale_rows * columns * scale
    return Cost(written + codes + scales + order, 2 * sizes["rows"] * d)


def _error(a: Arguments, wanted: Results) -> float:
    """Return 0 if the bits are those of float32 arithmetic, rounded once more, else infinity."""
    return 0.0 if torch.equal(a.out, wanted["out"].to(a.out.dtype)) else float("inf")


DEQUANTIZE = KernelSpec(
    name="dequantize",
    source="dequantize/dequantize.cu",
    entry="dequantize",
    parameters=declare(
        outputs("out"),
        inputs("codes", "scales"),
        optional("zeros", "group_of"),
        derived("int64", "pieces"),
        derived("int32", "d", "rows", "all_rows"),
        values("int32", "first"),
        derived("int32", "rows_log2", "scale_rows", "scale_columns", "group", "group_log2"),
        operator_only("int32", "group_size"),
        values("int32", "zero"),
    ),
    params={"scalar_t": list(KERNEL_DTYPES.values()), "code": list(cases.BITS)},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=dequantize_reference,
    make_inputs=cases.dequantize_inputs,
    sizes=cases.SIZES,
    bench_sizes=cases.BENCH_SIZES,
    tolerance=0.0,
    bench_needs={"scalar_t": "kiln::bf16", "code": ["U4", "E4M3"]},
    error=_error,
    paper="https://arxiv.org/abs/2210.17323",  # MXFP4: https://arxiv.org/abs/2310.10537
)
SPECS = [DEQUANTIZE]
define(SPECS)
