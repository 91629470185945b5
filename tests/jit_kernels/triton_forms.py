"""Compare every Triton form with float64, under Triton's interpreter; print a JSON report."""

from __future__ import annotations

import copy
import json

import torch

from kiln.jit_kernels.dispatch import triton_function
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.spec import DTYPES, label

torch.manual_seed(0)
checked, wrong = 0, []
for spec in all_specs().values():
    function = triton_function(spec.family, spec.name)
    for variant in spec.variants():
        checked += 1
        dtype = DTYPES[variant["scalar_t"]]
        for sizes in spec.sizes[:5]:
            arguments = spec.make_inputs(variant, sizes, "cpu")
            wide = [
                a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                for a in copy.deepcopy(arguments)
            ]
            named = dict(zip(spec.argument_names, arguments, strict=True))
            for name in spec.mutates:
                if name.startswith("out"):
                    named[name].fill_(float("nan"))
            function(*arguments)
            for name, want in zip(spec.mutates, spec.reference(*wide), strict=True):
                got = named[name].double()
                error = (got - want).abs() / want.abs().clamp(min=1)
                if error.numel() and not error.max() <= spec.tolerance[dtype]:
                    wrong.append(f"{label(spec, variant)} {sizes} {name}: {error.max()}")
print(json.dumps({"checked": checked, "wrong": wrong}))
