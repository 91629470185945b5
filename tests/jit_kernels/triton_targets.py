"""Compile every Triton form for absent GPUs; print a JSON report.

A fake driver reports the GPU to Triton, and fake tensors claim to be on it. The argument "quick"
leaves out all programs of a family but one, for one GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kiln.jit_kernels.declare import arch
from kiln.jit_kernels.declare.spec import Gpu, KernelSpec, Variant, label
from kiln.jit_kernels.registry import has_triton, is_in_triton, operators, triton_form

SHARED_BYTES = {86: 99 * 1024, 90: 227 * 1024}  # limit per block
# The forms that use the most shared memory, and each other form once; those of e4m3 twice, because
# they use the instructions of newer GPUs that convert it.
ATTENTION = {86: (("256", "SCALAR_T"), ("128", "SCALAR_T"), ("64", "kiln::e4m3")),
             90: (("256", "SCALAR_T"),)}  # fmt: skip


class NamedGpu:
    """The parts of a driver that compiling needs."""

    capability = 86

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton caches compiled kernels by device

    def get_current_stream(self, device: int) -> int:
        return 0


class OnGpu(torch.Tensor):
    """A tensor that claims to be on a GPU; its views do too."""

    is_cuda = property(lambda self: True)


present = NamedGpu()
driver.set_active(present)
# Before a form imports it:
arch.gpu = lambda device_index: Gpu(100, SHARED_BYTES[present.capability])
compiled: list[tuple[str, int]] = []
launch = JITFunction.run


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    compiled.append((self.__name__, kernel.metadata.shared))
    return kernel


JITFunction.run = compile_only


def compile_one(spec: KernelSpec, variant: Variant) -> None:
    """Of the first case that launches a block."""
    function = triton_form(spec.family, spec.name)
    compiled.clear()
    for sizes in spec.sizes:
        made = spec.make_arguments(variant, sizes, "cpu")
        on_gpu = (x.as_subclass(OnGpu) if isinstance(x, torch.Tensor) else x for x in made)
        function(spec.arguments(list(on_gpu)))
        if compiled:
            return


def jobs(capability: int) -> Iterator[tuple[KernelSpec, Variant]]:
    """Yield variants for bf16; other dtypes do not use more shared memory."""
    for spec in operators():
        if not has_triton(spec.family):
            continue
        for variant in spec.variants({"scalar_t": "kiln::bf16", "soft_cap": "false"}):
            size = (variant.get("head_tile"), variant.get("kv_t"))
            once = size[0] is None and (capability == 86 or "E4M3" in variant.values())
            if (once or size in ATTENTION[capability]) and is_in_triton(spec, variant):
                yield spec, variant


quick = "quick" in sys.argv
targets = [86] if quick else list(SHARED_BYTES)
work = [(capability, *job) for capability in targets for job in jobs(capability)]
if quick:
    work = list({spec.family: (gpu, spec, variant) for gpu, spec, variant in work}.values())
wrong: list[str] = []
for capability, spec, variant in work:
    present.capability = capability
    compile_one(spec, variant)
    if not compiled:
        wrong.append(f"{label(spec, variant)}: nothing was launched")
    wrong += [
        f"{label(spec, variant)}: {name} takes {shared} bytes of shared memory on {capability}"
        for name, shared in compiled
        if shared > SHARED_BYTES[capability]
    ]
print(json.dumps({"checked": len(work), "wrong": wrong}))
