"""Compare every Triton form with float64, under Triton's interpreter; print a JSON report."""

from __future__ import annotations

import json

import torch

from kiln.jit_kernels.parity import compare
from kiln.jit_kernels.registry import all_specs
from kiln.jit_kernels.spec import label
from kiln.jit_kernels.triton_forms import has_triton, triton_form

torch.manual_seed(0)
checked, wrong = 0, []
for spec in all_specs().values():
    if not has_triton(spec.family):
        continue
    function = triton_form(spec.family, spec.name)
    for variant in spec.variants():
        checked += 1
        for sizes in spec.sizes[:5]:
            parity = compare(spec, variant, sizes, function)
            if not parity.holds:
                wrong.append(f"{label(spec, variant)} {sizes}: {parity}")
print(json.dumps({"checked": checked, "wrong": wrong}))
