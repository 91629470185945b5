#!/usr/bin/env python3
"""Write the files of a new kernel: its template, its spec, and faults for the mutation tests.

    python tools/new_kernel.py scale_rows

writes kernel_sources/scale_rows/scale_rows.cu and jit_kernels/ops/scale_rows.py, a working kernel
(out = x * factor) that passes every generic test, with a comment at each place to change. It also
writes tests/jit_kernels/faults/scale_rows.py, planted faults that the tests must catch. No other
file needs an edit.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TEMPLATE = """\
// out[i] = x[i] * factor      x, out: [size]
//
// Say here what may be assumed of shapes and alignment. Compile-time parameters: SCALAR_T.
#include "kiln/ptx/launch.cuh"

#ifndef SCALAR_T  // defaults, so that an editor can parse this file on its own
#define SCALAR_T kiln::bf16
#endif

extern "C" __global__ void __launch_bounds__(256)
NAME(SCALAR_T* out, const SCALAR_T* x, int64_t size, float factor) {
  kiln::pdl_wait_then_trigger();
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < size; i += step)
    kiln::from_float(kiln::to_float(x[i]) * factor, out[i]);
}
"""

SPEC = '''\
"""NAME: say what the family does."""

from __future__ import annotations

from typing import Any

import torch

from kiln.jit_kernels.declare.parameters import Arguments, declare, derived, inputs, outputs, values
from kiln.jit_kernels.ops.shared.shapes import check_dtype, takes_arrays
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
from kiln.jit_kernels.torch_ops import call, define

_THREADS = 256


@takes_arrays
def NAME(x: torch.Tensor, factor: float) -> torch.Tensor:
    """Return x * factor. x: any shape. Raises TypeError on a dtype other than bf16, fp16, fp32."""
    check_dtype("NAME", x=x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    call(_SPEC, out=out, x=x.contiguous(), factor=factor)
    return out


def _reference(a: Arguments) -> Results:
    """Pure torch, in float32 or in float64 on float64 inputs: the oracle and the CPU operator."""
    wide = a.x if a.x.dtype == torch.float64 else a.x.float()
    return {"out": (wide * a.factor).to(a.x.dtype)}


def _bind(a: Arguments) -> Bound:
    sizes = {"size": a.x.numel()}
    return Bound({"scalar_t": SCALARS[a.x.dtype]}, sizes, derived=sizes)


def _geometry(variant: Variant, sizes: Sizes, gpu: Gpu) -> LaunchGeometry:
    return LaunchGeometry((-(-sizes["size"] // _THREADS), 1, 1), (_THREADS, 1, 1))


def _cost(variant: Variant, sizes: Sizes) -> Cost:
    return Cost(2 * sizes["size"] * DTYPES[variant["scalar_t"]].itemsize, sizes["size"])


def _inputs(variant: Variant, sizes: Sizes, device: str) -> dict[str, Any]:
    x = torch.randn(sizes["size"], device=device).to(DTYPES[variant["scalar_t"]])
    return {"out": torch.empty_like(x), "x": x, "factor": 1.5}


_SPEC = KernelSpec(
    name="NAME",
    source="NAME/NAME.cu",
    entry="NAME",
    parameters=declare(  # names and order of the .cu file
        outputs("out"), inputs("x"), derived("int64", "size"), values("float", "factor")
    ),
    params={"scalar_t": list(DTYPES)},
    bind=_bind,
    geometry=_geometry,
    cost=_cost,
    reference=_reference,
    make_inputs=_inputs,
    sizes=[{"size": size} for size in (0, 1, 255, 1000)],
    bench_sizes=[{"size": 1 << bits} for bits in (12, 20, 26)],
    tolerance={torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    paper="where the algorithm comes from",
)
SPECS = [_SPEC]
define(SPECS)
'''

FAULTS = '''\
"""Faults planted in NAME; see test_faults.py. Each must be caught."""

FAULTS = [
    {
        "kernel": "NAME",
        "name": "the last element left out",
        "old": "i < size; i += step",
        "new": "i < size - 1; i += step",
    },
    {
        "kernel": "NAME",
        "name": "past the end",
        "old": "i < size; i += step",
        "new": "i <= size; i += step",
    },
]
'''


def main() -> None:
    """Write the files. Exits with a message if the name is taken or no identifier."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="lower-case identifier; also the family and the toggle")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    args = parser.parse_args()
    if not re.fullmatch(r"[a-z][a-z0-9_]*", args.name):
        raise SystemExit(f"error: {args.name!r}: write lower-case letters, digits and _")
    files = {
        args.root / "kernel_sources" / args.name / f"{args.name}.cu": TEMPLATE,
        args.root / "jit_kernels" / "ops" / f"{args.name}.py": SPEC,
        args.root / "tests" / "jit_kernels" / "faults" / f"{args.name}.py": FAULTS,
    }
    for path in files:
        if path.exists():
            raise SystemExit(f"error: {path} exists already")
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("NAME", args.name))
        print(path.relative_to(args.root))


if __name__ == "__main__":
    main()
