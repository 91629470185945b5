"""Compare every Triton form with float64, under Triton's interpreter; print a JSON report.

With the argument "quick" only the first variant of a kernel of each family runs, without its
largest sizes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time

import torch
from triton.runtime.interpreter import interpreter_builder

from kiln.jit_kernels.check.schedules import covering_variants
from kiln.jit_kernels.declare.parity import compare
from kiln.jit_kernels.declare.spec import label
from kiln.jit_kernels.registry import has_triton, is_in_triton, operators, triton_form

# What is slow to interpret: of rotary, a program per token and head; of LoRA, long sums.
MOST_TOKENS, MOST_INPUTS = 33, 264


def shortened(sizes):
    """Return the sizes with fewer tokens if each token is a program, and shorter sums."""
    most = {"tokens": MOST_TOKENS} if "heads" in sizes else {"input_size": MOST_INPUTS}
    return {name: min(size, most.get(name, size)) for name, size in sizes.items()}


def watch_overflows(on):
    """Fail on an overflow of a 32-bit integer; by default Triton ignores it."""
    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, debug=on, sanitize_overflow=on
    )


torch.manual_seed(0)
quick = "quick" in sys.argv
checked, wrong, seconds = 0, [], {}
# Other operators do the work of a fused one that has no form.
specs = [
    spec
    for spec in operators()
    if has_triton(spec.family) and (is_in_triton(spec, {}) or not spec.has_unfused_path)
]
for spec in {spec.family: spec for spec in specs}.values() if quick else specs:
    function, start = triton_form(spec.family, spec.name), time.process_time()
    variants = [variant for variant in covering_variants(spec) if is_in_triton(spec, variant)]
    for number, variant in enumerate(variants):
        if quick and number:
            break
        checked += 1
        # Exact kernels and first variants run all sizes, of which the last are the largest.
        every = spec.tolerance == 0.0 or number == 0
        for sizes in spec.sizes if every and not quick else spec.sizes[:4]:
            watch_overflows(number == 0 and sizes is spec.sizes[-1])
            parity = compare(spec, variant, shortened(sizes), function)
            if not parity.holds:
                wrong.append(f"{label(spec, variant)} {sizes}: {parity}")
    seconds[spec.name] = round(time.process_time() - start, 1)
print(json.dumps({"checked": checked, "wrong": wrong, "seconds": seconds}))
