"""Gated activations: silu_and_mul, gelu_and_mul, gelu_tanh_and_mul."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from kiln.jit_kernels.shapes import as_rows, check_dtype, check_shape, dense_rows, takes_arrays
from kiln.jit_kernels.spec import (
    DTYPES,
    SCALARS,
    Bound,
    Cost,
    Gpu,
    KernelSpec,
    LaunchGeometry,
    Sizes,
    Variant,
)
from kiln.jit_kernels.torch_ops import call, define

_THREADS = 128
_PIECES, _PIECE_BYTES = 2, 8  # what a thread takes: kPieces and Piece of the template
_MAX_BLOCKS = 65535  # the limit of grid.y and grid.z
_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@takes_arrays
def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return silu(x[..., :d]) * x[..., d:] for x [..., 2d], as [..., d], rounded once.

    Rows may be strided. With ``out``, write there and return it. Raises ValueError on an odd
    last dimension or a wrong ``out``, TypeError on a dtype other than bf16, fp16, fp32.
    """
    return _act_and_mul("silu", x, out)


@takes_arrays
def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(x[..., :d]) * x[..., d:] with the exact (erf) GELU; as silu_and_mul."""
    return _act_and_mul("gelu", x, out)


@takes_arrays
def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return gelu(x[..., :d]) * x[..., d:] with the tanh GELU; as silu_and_mul."""
    return _act_and_mul("gelu_tanh", x, out)


def _act_and_mul(activation: str, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    function = f"{activation}_and_mul"
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ValueError(f"{function}: x is {list(x.shape)}, want an even last dimension")
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    if out is None:
        out = x.new_empty(shape)
    check_dtype(function, x=x, out=out)
    check_shape(function, "out", out, shape)
    spec = _BY_ACTIVATION[activation]
    rows = as_rows(out)
    if rows is None:
        rows = torch.empty(shape, dtype=x.dtype, device=x.device).view(-1, shape[-1])
        call(spec, rows, dense_rows(x))
        return out.copy_(rows.view(shape))
    call(spec, rows, dense_rows(x))
    return out


def _reference(activation: str, out: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    """[rows, 2d] -> [rows, d], in float32 (float64 on float64 inputs), rounded once."""
    wide = x if x.dtype == torch.float64 else x.float()
    gate, up = wide.chunk(2, dim=-1)
    return ((_FUNCTIONS[activation](gate) * up).to(x.dtype),)


def _bind(activation: str, out: torch.Tensor, x: torch.Tensor) -> Bound:
    rows, d = out.shape
    variant = {"scalar_t": SCALARS[x.dtype], "activation": activation}
    values = (out, x, rows, d, out.stride(0), x.stride(0))
    return Bound(variant, {"rows": rows, "d": d}, values)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    """Cover a row with blocks of 128 threads; a narrow row with part of a block."""
    pieces = -(-sizes["d"] * DTYPES[variant["scalar_t"]].itemsize // _PIECE_BYTES)
    wanted = -(-pieces // _PIECES)
    across = min(1 << max(wanted - 1, 0).bit_length(), _THREADS)
    down = _THREADS // across
    rows = -(-sizes["rows"] // down)
    deep = max(-(-rows // _MAX_BLOCKS), 1)
    return LaunchGeometry((-(-wanted // across), -(-rows // deep), deep), (across, down, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    elements = sizes["rows"] * sizes["d"]
    return Cost(3 * elements * DTYPES[variant["scalar_t"]].itemsize, 5 * elements)


def _inputs(variant: Variant, sizes: Sizes, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = DTYPES[variant["scalar_t"]]
    rows, d, gap = sizes["rows"], sizes["d"], sizes.get("gap", 0)
    x = torch.randn(rows, 2 * d + gap, device=device).mul_(3).to(dtype)[:, : 2 * d]
    gap = sizes.get("out_gap", gap)
    return torch.empty(rows, d + gap, device=device, dtype=dtype)[:, :d], x


_SIZES = [
    {"rows": rows, "d": d, "gap": gap}
    for rows, d, gap in [
        (0, 64, 0), (1, 1, 0), (3, 7, 0), (2, 129, 1), (5, 256, 8), (1, 2056, 0), (2, 4099, 3),
        (3, 64, 3), (2, 2048, 0), (1, 2052, 0),
    ]
] + [{"rows": 9, "d": 60, "gap": 8, "out_gap": 4}]  # fmt: skip

SPECS = [
    KernelSpec(
        name=f"{activation}_and_mul",
        source="activation/act_and_mul.cu",
        entry="act_and_mul",
        schema="(Tensor(a!) out, Tensor x) -> ()",
        arguments=("pointer", "pointer", "int64", "int64", "int64", "int64"),
        params={"scalar_t": list(DTYPES), "activation": [activation]},
        bind=partial(_bind, activation),
        geometry=_geometry,
        cost=_cost,
        reference=partial(_reference, activation),
        make_inputs=_inputs,
        sizes=_SIZES,
        bench_sizes=[{"rows": rows, "d": 14336} for rows in (1, 16, 128, 1024, 8192)],
        tolerance={torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3},
        paper="https://arxiv.org/abs/2002.05202",
    )
    for activation in _FUNCTIONS
]
_BY_ACTIVATION = dict(zip(_FUNCTIONS, SPECS, strict=True))
define(SPECS)
