"""Kernels loaded once and launched on the current stream.

Everything is loaded before the KV pool is sized and before any graph is captured: loading takes
device memory and is forbidden during capture. Handles live as long as the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch

from kiln.jit_kernels.arch import compute_capability, device_arch, gpu
from kiln.jit_kernels.catalog import best_form
from kiln.jit_kernels.compile.build import Built, build
from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.errors import LateKernel, NoSuchKernel
from kiln.jit_kernels.launchers.choose import EARLY_ARCH, launcher
from kiln.jit_kernels.launchers.protocol import Launcher
from kiln.jit_kernels.packing import ArgumentBlock
from kiln.jit_kernels.parameters import Arguments, KernelValue
from kiln.jit_kernels.ready import ready_guard
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import KernelSpec, LaunchGeometry, Needs, label, needed
from kiln.jit_kernels.template import early_launch_hint


class LoadedKernel:
    """A kernel on one device, ready to launch. ``function`` is the launcher's own handle."""

    def __init__(
        self, name: str, function: Any, c_types: Sequence[str], launcher: Launcher
    ) -> None:
        self.name = name
        self._function = function
        self._block = ArgumentBlock(c_types)
        self._queue = launcher.launch

    def launch(self, geometry: LaunchGeometry, values: Sequence[KernelValue], stream: int) -> None:
        """Queue the kernel on a stream; nothing is queued for an empty grid. Raises LaunchError."""
        if 0 not in geometry.grid:
            self._queue(self.name, self._function, geometry, self._block.pack(values), stream)


def launch(spec: KernelSpec, a: Arguments) -> None:
    """Launch a spec's kernel on the operator's arguments, on the current stream of their device.

    A kernel that nothing has loaded yet is built and loaded now, where ReadyGuard lets it. Raises
    LaunchError when the driver refuses, and what ``load_kernels`` raises.
    """
    bound = spec.bind(a)
    device = a[spec.parameters.first_tensor].device
    key = (spec.name, *bound.variant.values())
    loaded = _loaded(device.index)
    if key not in loaded:
        load_kernels([spec], device, bound.variant)
    form, kernel = loaded[key]
    geometry = form.geometry(bound.variant, bound.sizes, gpu(device.index))
    values = spec.parameters.kernel_values(a, bound.derived)
    kernel.launch(geometry, values, _current_stream()(device.index))


def load_kernels(
    specs: Sequence[KernelSpec],
    device: torch.device,
    needs: Needs = MappingProxyType({}),
    on_built: Callable[[str, Built], None] = lambda name, built: None,
) -> None:
    """Build (or find) and load the variants of some specs on a CUDA device.

    All of them, or those that a model runs. Nothing is loaded unless all are built. Raises
    NoSuchKernel where a kernel does not come as it is needed or not for the device; CompileError,
    SealedMiss, LaunchError, LateKernel and ToolchainMissing.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    loaded, arch = _loaded(index), target_arch(torch.device("cuda", index))
    for spec in specs:
        _check_comes(spec, needs, arch)
    wanted = [
        (spec, variant)
        for spec in specs
        for variant in spec.variants(needs)
        if (spec.name, *variant.values()) not in loaded
    ]
    if not wanted:
        return
    _refuse_during_capture(label(*wanted[0]))
    forms = [best_form(spec, variant, arch) for spec, variant in wanted]
    built = [
        build(form, variant, arch, kernel_cache())
        for form, (_, variant) in zip(forms, wanted, strict=True)
    ]
    with torch.cuda.device(index):
        torch.cuda.synchronize()  # make torch's own context current before the driver loads
        for (spec, variant), form, one in zip(wanted, forms, built, strict=True):
            name = label(form, variant)
            ready_guard().passes(name, "loaded")
            function = launcher().load(
                name, one.cubin, form.entry, form.shared_bytes(variant, gpu(index)),
                early_hint=_early_hint(form, arch),
            )  # fmt: skip
            kernel = LoadedKernel(name, function, form.c_types, launcher())
            loaded[spec.name, *variant.values()] = form, kernel
            on_built(label(spec, variant), one)


def _early_hint(spec: KernelSpec, arch: str) -> str:
    """Return the hint for an early launch of a kernel, "" if the GPU has no early launches."""
    return early_launch_hint(spec.source) if compute_capability(arch) >= EARLY_ARCH else ""


def _check_comes(spec: KernelSpec, needs: Needs, arch: str) -> None:
    if spec.only_arch not in ("", arch):
        raise NoSuchKernel(f"{spec.name} is for {spec.only_arch} alone, and this is {arch}")
    if compute_capability(arch) < spec.min_arch:
        raise NoSuchKernel(f"{spec.name} needs sm_{spec.min_arch} or later, and this is {arch}")
    lacking = [
        f"{name} {value} (it has {', '.join(values)})"
        for name, values in spec.params.items()
        for value in needed(needs, name)
        if value not in values
    ]
    if lacking or next(spec.variants(needs), None) is None:
        together = [f"{name} {value}" for name in spec.params for value in needed(needs, name)]
        raise NoSuchKernel(f"{spec.name} does not come for {', '.join(lacking or together)}")


def target_arch(device: torch.device) -> str:
    """Return what to compile for: ``KILN_KERNEL_ARCH``, else what the device is."""
    return settings().kernel_arch or device_arch(device)


def _refuse_during_capture(name: str) -> None:
    """Raise before the driver would: its refusal ends the capture and tells no name."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LateKernel(
            f"{name} would be loaded while a CUDA graph is captured, which CUDA forbids: call "
            f"kiln.jit_kernels.choose.prepare() before the capture"
        )


@cache
def _current_stream() -> Callable[[int], int]:
    """Return a function from a device's index to its current stream, as a CUstream.

    torch.cuda.current_stream makes an object and takes 2.6 µs, a fifth of a launch; the compiled
    code that torch itself makes asks as is done here.
    """
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


@cache
def _loaded(device_index: int) -> dict[tuple[str, ...], tuple[KernelSpec, LoadedKernel]]:
    """Return the kernels loaded on a device, by the operator's name and the variant's values."""
    return {}
