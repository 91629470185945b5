"""What quantized_gemm can multiply, and which variant does."""

from __future__ import annotations

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import SCALARS, Variant
from kiln.jit_kernels.ops.quantized_linear.cases import FEW_ROWS, MANY_ROWS, padded
from kiln.jit_kernels.ops.quantized_linear.reference import BLOCK

GROUPS, FINE_GROUP = (32, 64, 128), 32  # inputs of a scale: of whole numbers of 4 bits; of e2m1
ALIGNED = 16  # bytes
_MOST_INPUTS = 2**24
_FP8 = torch.float8_e4m3fn
_BYTES = {_FP8: "E4M3", torch.int8: "I8"}  # formats of 8 bits


def is_aligned(tensor: torch.Tensor, size: int = ALIGNED) -> bool:
    """Whether every row begins at a multiple of ``size`` bytes."""
    return not _start(tensor) % size and not (
        len(tensor) > 1 and tensor.stride(0) * tensor.itemsize % size
    )


def _start(tensor: torch.Tensor) -> int:
    """Return the address of the first byte."""
    if tensor.is_meta:
        return int(tensor.storage_offset()) * tensor.itemsize
    return tensor.data_ptr()


def variant_of(a: Arguments) -> Variant:
    """Return the variant that multiplies."""
    four = "E2M1" if a.scales.dtype == torch.uint8 else "U4"
    return {
        "scalar_t": SCALARS[a.out.dtype],
        "weight": _BYTES.get(a.codes.dtype, four),
        "group": str(_group_of(a)),
        "tile_rows": str(a.tile_rows),
    }


def code_stride(codes: torch.Tensor) -> int:
    """Return the bytes from an output's codes to those of the next, or of the next expert."""
    *lead, outputs, size = codes.shape
    if outputs > 1:
        return int(codes.stride(-2))
    return int(codes.stride(0)) if lead and lead[0] > 1 else size


def outputs_log2(a: Arguments) -> int:
    """Return the logarithm of how many outputs share scales."""
    return 0 if a.scales.shape[-2] == a.codes.shape[-2] else BLOCK.bit_length() - 1


def why_not(a: Arguments) -> str:
    """Return why the kernel cannot multiply; an empty text if it can."""
    rows, size = a.x.shape
    if rows < 1 or not 1 <= size <= _MOST_INPUTS or size % 8:
        return f"x is {rows} x {size}; want rows of a multiple of 8, up to {_MOST_INPUTS}"
    if a.tile_rows not in (FEW_ROWS, MANY_ROWS):
        return f"tile_rows is {a.tile_rows}; want {FEW_ROWS} or {MANY_ROWS}"
    if a.out.dtype not in (torch.bfloat16, torch.float16) or a.x.dtype != a.out.dtype:
        return f"x of {a.x.dtype} and out of {a.out.dtype}; want bf16 or fp16"
    if a.x.stride(1) != 1 or a.out.stride(1) != 1:
        return "elements of a row are not side by side"
    if not is_aligned(a.x):
        return f"rows of x do not begin at multiples of {ALIGNED} bytes"
    return _why_no_weights(a) or _why_no_options(a) or _why_no_memory(a)


def _group_of(a: Arguments) -> int:
    """Return how many inputs share a scale; 0: all of an output."""
    columns: int = a.scales.shape[-1]
    if a.codes.dtype in _BYTES:
        return 0 if columns == 1 else BLOCK
    size = padded(a.x.shape[1])
    return 0 if columns == 1 and a.scales.dtype != torch.uint8 else size // max(columns, 1)


def _why_no_weights(a: Arguments) -> str:
    """Return what is wrong with codes and scales; an empty text if nothing is."""
    size, is_byte = a.x.shape[1], a.codes.dtype in _BYTES
    *lead, outputs, width = a.codes.shape if a.codes.dim() > 1 else (0, 0)
    is_wrong = width != (size if is_byte else padded(size) // 2)
    if is_wrong or len(lead) != (0 if a.ends is None else 1) or not _has_rows(a, [*lead], outputs):
        shapes = {name: list(getattr(a, name).shape) for name in ("x", "codes", "scales")}
        return f"shapes that do not fit each other: {shapes}"
    if list(a.out.shape) != [len(a.x), outputs]:
        return f"out is {list(a.out.shape)}; want {[len(a.x), outputs]}"
    if a.codes.dtype not in (torch.uint8, *_BYTES):
        return f"codes of {a.codes.dtype}; want uint8, float8_e4m3fn or int8"
    if a.scales.dtype != torch.float32 and (is_byte or a.scales.dtype != torch.uint8):
        wanted = "float32" if is_byte else "float32 or uint8"
        return f"codes of {a.codes.dtype} and scales of {a.scales.dtype}; want {wanted}"
    return _why_no_blocks(a, size) if is_byte else _why_no_groups(a, padded(size))


def _has_rows(a: Arguments, lead: list[int], outputs: int) -> bool:
    """Whether scales have rows for these experts and outputs."""
    rows = (outputs, -(-outputs // BLOCK)) if a.codes.dtype in _BYTES else (outputs,)
    shape = [*a.scales.shape]
    return shape[:-2] == lead and len(shape) > 1 and shape[-2] in rows


def _why_no_groups(a: Arguments, size: int) -> str:
    """Return what is wrong with the groups of so many padded inputs with 4-bit codes."""
    columns, group = a.scales.shape[-1], _group_of(a)
    known = (FINE_GROUP,) if a.scales.dtype == torch.uint8 else (*GROUPS, 0)
    if group in known and not (group and columns * group != size):
        return ""
    return f"{columns} scales of {size} padded inputs; want one of each {known}, 0 for all"


def _why_no_blocks(a: Arguments, size: int) -> str:
    """Return what is wrong with 8-bit codes and the scales of their blocks."""
    if size % ALIGNED:
        return f"codes of 8 bits in rows of {size}; want a multiple of {ALIGNED}"
    columns, blocks = a.scales.shape[-1], -(-size // BLOCK)
    if columns == 1 or (a.codes.dtype == _FP8 and blocks <= columns <= _MOST_INPUTS):
        return ""
    wanted = f"1, or {blocks} or more" if a.codes.dtype == _FP8 else "1"
    return f"{columns} scales of {size} inputs with codes of {a.codes.dtype}; want {wanted}"


def _why_no_options(a: Arguments) -> str:
    """Return what is wrong with zeros, bias and ends."""
    if a.zeros is not None and (a.scales.dtype == torch.uint8 or a.codes.dtype in _BYTES):
        return f"zero points beside codes of {a.codes.dtype} and scales of {a.scales.dtype}"
    if a.bias is not None and a.ends is not None:
        return "a bias beside experts"
    experts = a.codes.shape[:-2]
    for name, shape, dtype in (
        ("zeros", a.scales.shape, torch.int16),
        ("bias", a.codes.shape[-2:-1], a.out.dtype),
        ("ends", experts, torch.int32),
    ):
        given = getattr(a, name)
        if given is not None and (given.shape != shape or given.dtype != dtype):
            return f"{name} is {list(given.shape)} of {given.dtype}; want {list(shape)} of {dtype}"
    return ""


def _why_no_memory(a: Arguments) -> str:
    """Return what is wrong with how weights lie in memory."""
    is_byte = a.codes.dtype in _BYTES
    packed = {} if is_byte else {"codes": a.codes}
    groups = {**packed, "scales": a.scales, "zeros": a.zeros}
    for name, given in {**groups, "bias": a.bias, "ends": a.ends}.items():
        if given is not None and not given.is_contiguous():
            return f"{name} is not contiguous"
    for name, given in {"codes": a.codes}.items() if is_byte else groups.items():
        if given is not None and _start(given) % ALIGNED:
            return f"{name} does not begin at a multiple of {ALIGNED} bytes"
    return _why_no_rows_of_bytes(a.codes) if is_byte else ""


def _why_no_rows_of_bytes(codes: torch.Tensor) -> str:
    """Return what is wrong with the strides of 8-bit codes [.., outputs, inputs]."""
    stride = code_stride(codes)
    if codes.stride(-1) != 1 or stride % ALIGNED or not codes.shape[-1] <= stride <= _MOST_INPUTS:
        return (
            f"codes have strides {codes.stride()}; want rows of neighbours that begin at multiples "
            f"of {ALIGNED} bytes, up to {_MOST_INPUTS} apart"
        )
    if codes.dim() > 2 and len(codes) > 1 and codes.stride(0) != codes.shape[1] * stride:
        return f"codes have strides {codes.stride()}; want experts right behind each other"
    return ""
