"""What skinny_gemm can multiply, and which variant does."""

from __future__ import annotations

from types import MappingProxyType

import torch

from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import SCALARS, Variant
from kiln.jit_kernels.ops.linear.reference import BLOCK
from kiln.jit_kernels.ops.shared.four_bits import CHUNK

TILE_ROWS, MOST_TILES = 8, 2
MOST_ROWS = TILE_ROWS * MOST_TILES
_MOST_GROUPED = 65535  # rows of x with experts: blocks of a grid's second dimension
_DENSE_EXPERT = 4  # rows for each expert from which on two tiles are taken
_ALIGNED = 16  # bytes
_MOST_SCALES = 2**31 - 1
_FP8 = torch.float8_e4m3fn
_FORMATS = MappingProxyType({_FP8: "E4M3", torch.int8: "I8"})  # of codes in a byte each
_SCALED = MappingProxyType({128: "kByBlock", 64: "kBy64", 32: "kBy32"})  # inputs of a scale


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether every row [.., rows, size] can be loaded in vectors, up to its end."""
    *lead, size = tensor.shape
    steps = (step for n, step in zip(lead, tensor.stride()[:-1], strict=True) if n > 1)
    return not _start(tensor) and not any(n * tensor.itemsize % _ALIGNED for n in (size, *steps))


def _start(tensor: torch.Tensor) -> int:
    """Return how many bytes behind an aligned address a tensor begins."""
    if tensor.is_meta:
        return int(tensor.storage_offset()) * tensor.itemsize % _ALIGNED
    return tensor.data_ptr() % _ALIGNED


def inputs_of(weight: torch.Tensor) -> int:
    """Return how many inputs the rows of weights have, with those behind."""
    return weight.shape[-1] * (2 if weight.dtype == torch.uint8 else 1)


def variant_of(a: Arguments, gate: str = "") -> Variant:
    """Return the variant that multiplies. ``gate``: the activation behind it."""
    variant = {
        "scalar_t": SCALARS[a.out.dtype],
        "weight": _format_of(a.weight, a.scales),
        "input": _format_of(a.x, None),
        "scaled": _scaled(a),
        "tiles": str(a.tiles),
        "experts": "false" if a.ends is None else "true",
    }
    return variant | {"gate": gate} if gate else variant


def tiles_for(rows: int, experts: int) -> int:
    """Return the tiles of 8 rows of a block that suit a product; no bit depends on them.

    experts: how many share the rows; 0: there are none.
    """
    if not experts:
        return -(-rows // TILE_ROWS)
    return 1 if rows <= _DENSE_EXPERT * experts else MOST_TILES


def _format_of(tensor: torch.Tensor, scales: torch.Tensor | None) -> str:
    if tensor.dtype == torch.uint8:
        return "E2M1" if scales is not None and scales.dtype == torch.uint8 else "U4"
    return _FORMATS.get(tensor.dtype, "Plain")


def _scaled(a: Arguments) -> str:
    if a.scales is None:
        return "kNone"
    columns = a.scales.shape[-1]
    if columns == 1:
        return "kByOutput"
    return _SCALED[inputs_of(a.weight) // columns] if a.weight.dtype == torch.uint8 else "kByBlock"


def why_not(a: Arguments, *, is_gated: bool = False) -> str:
    """Return why the kernel cannot multiply; an empty text if it can.

    ``is_gated``: whether half of the rows of weights are gates, so that out has half as many.
    """
    if a.x.dim() != 2 or a.weight.dim() < 2:
        return f"x {list(a.x.shape)} and weight {list(a.weight.shape)} are not of rows"
    if is_gated and a.weight.dim() != 2:
        return f"weight {list(a.weight.shape)} is of experts; want one [outputs, inputs]"
    rows, size = a.x.shape
    if problem := _why_no_experts(a):
        return problem
    lead = a.weight.shape[:-2]
    most = _MOST_GROUPED if lead else MOST_ROWS
    if not 1 <= rows <= most or not size:
        return f"x is {rows} x {size}; want 1 to {most} rows"
    if a.tiles not in range(1 if lead else -(-rows // TILE_ROWS), MOST_TILES + 1):
        return f"{a.tiles} tiles of {TILE_ROWS} for {rows} rows; want at most {MOST_TILES}"
    wanted = -(-size // CHUNK) * CHUNK if a.weight.dtype == torch.uint8 else size
    outputs = a.weight.shape[-2] / (2 if is_gated else 1)
    if inputs_of(a.weight) != wanted or a.out.shape != (rows, outputs):
        shapes = {name: list(getattr(a, name).shape) for name in ("x", "weight", "out")}
        return f"shapes that do not fit each other: {shapes}"
    if any(one.stride(-1) != 1 for one in (a.x, a.weight, a.out)):
        return "elements of a row are not side by side"
    if a.bias is not None and not (a.bias.is_contiguous() and a.bias.shape == a.weight.shape[:-1]):
        return f"bias {list(a.bias.shape)} is not contiguous, or not of {list(a.weight.shape[:-1])}"
    if a.bias is not None and a.bias.dtype != a.out.dtype:
        return f"bias of {a.bias.dtype} beside out of {a.out.dtype}"
    return _why_no_codes(a, size)


def _why_no_experts(a: Arguments) -> str:
    """Return what is wrong with the experts of rows; an empty text if nothing is."""
    lead, of_rows = a.weight.shape[:-2], (len(a.x),) if a.weight.dim() > 2 else ()
    for name, wanted in (("ends", lead), ("expert_of", of_rows)):
        one = getattr(a, name)
        given = () if one is None else tuple(one.shape)
        if given != tuple(wanted) or (one is not None and (len(given) != 1 or not given[0])):
            return f"{len(a.x)} rows and weights {list(a.weight.shape)}, but {name} {list(given)}"
        if one is not None and (one.dtype != torch.int32 or not one.is_contiguous()):
            return f"{name} of {one.dtype}; want contiguous torch.int32"
    return ""


def _why_no_codes(a: Arguments, size: int) -> str:
    """Return what is wrong with dtypes, codes and scales; an empty text if nothing is."""
    codes = (*_FORMATS, torch.uint8)
    coded = {n: t for n, t in (("x", a.x), ("weight", a.weight)) if t.dtype in codes}
    scaled = {"x": a.x_scales is not None, "weight": a.scales is not None}
    floats = {t.dtype for name, t in (("x", a.x), ("weight", a.weight)) if name not in coded}
    if floats - {a.out.dtype}:
        return f"{floats.pop()} beside out of {a.out.dtype}"
    if any(scaled[name] != (name in coded) for name in scaled) or (coded and "weight" not in coded):
        return f"codes in {list(coded)} and scales of {[name for name in scaled if scaled[name]]}"
    if a.zeros is not None and (a.weight.dtype != torch.uint8 or a.zeros.shape != a.scales.shape):
        return f"zeros {list(a.zeros.shape)} beside weights of {a.weight.dtype}"
    if a.zeros is not None and a.zeros.dtype != torch.int16:
        return f"zeros of {a.zeros.dtype}; want torch.int16"
    if not coded:
        return ""
    if problem := _why_no_scales(a, size):
        return problem
    for name in ("x", "weight"):
        if not is_aligned(getattr(a, name)):
            return f"beside codes, rows of {name} do not begin and end at multiples of 16 bytes"
    if any(one is not None and not one.is_contiguous() for one in (a.scales, a.zeros)):
        return "scales or zeros are not contiguous"
    if a.scales.numel() > _MOST_SCALES:
        return f"{a.scales.numel()} scales; want at most {_MOST_SCALES}"
    if a.weight.dtype == torch.uint8:
        return _why_no_groups(a)
    if "x" in coded and a.x.dtype != a.weight.dtype:
        return f"codes of {a.x.dtype} in x beside weights of {a.weight.dtype}"
    step = BLOCK if a.scales.shape[-1] > 1 else BLOCK // 2
    if size % step:
        return f"codes in rows of {size}; want a multiple of {step}"
    return _why_no_scales_of_x(a, size) if "x" in coded else ""


def _why_no_scales(a: Arguments, size: int) -> str:
    """Return what is wrong with dtypes and shapes of scales; an empty text if nothing is.

    Only 8-bit floats may have a scale for each block.
    """
    outputs, is_small = a.weight.shape[-2], a.weight.dtype == torch.uint8
    rows = (outputs, -(-outputs // BLOCK)) if a.weight.dtype == _FP8 else (outputs,)
    dtypes = (torch.float32, torch.uint8) if is_small else (torch.float32,)
    *lead, of_outputs, columns = a.scales.shape if a.scales.dim() > 1 else (0, 0)
    fits = lead == list(a.weight.shape[:-2]) and of_outputs in rows and columns
    fits = fits and (columns == 1 or a.weight.dtype != torch.int8)
    if not fits or a.scales.dtype not in dtypes or (not is_small and 1 < columns < size // BLOCK):
        of_what = f"weights {list(a.weight.shape)} of {a.weight.dtype}"
        return f"scales {list(a.scales.shape)} of {a.scales.dtype} beside {of_what}"
    return ""


def _why_no_scales_of_x(a: Arguments, size: int) -> str:
    """Return what is wrong with the scales of x; an empty text if nothing is."""
    wanted = (len(a.x), size // BLOCK if a.scales.shape[-1] > 1 else 1)
    if a.x_scales.shape == wanted and a.x_scales.dtype == torch.float32:
        return ""
    of_scales = f"x_scales {list(a.x_scales.shape)} of {a.x_scales.dtype}"
    return f"{of_scales}; want {list(wanted)} of torch.float32"


def _why_no_groups(a: Arguments) -> str:
    """Return what is wrong with the groups of 4-bit codes; an empty text if nothing is."""
    outputs, columns = a.scales.shape[-2:]
    whole, is_e2m1 = inputs_of(a.weight), a.scales.dtype == torch.uint8
    group = whole // columns
    known = group in ((32,) if is_e2m1 else _SCALED) or (columns == 1 and not is_e2m1)
    if whole % columns or not known:
        return f"scales {list(a.scales.shape)} of {outputs} x {whole} codes of 4 bits"
    if a.x.dtype != a.out.dtype or (is_e2m1 and a.zeros is not None):
        return f"codes of 4 bits beside x of {a.x.dtype}, or e2m1 with zero points"
    return "" if not _start(a.scales) else "scales do not begin at a multiple of 16 bytes"
