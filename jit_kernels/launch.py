"""Kernels loaded once and launched on the current stream.

Everything is loaded before the KV pool is sized and before any graph is captured: loading takes
device memory and is forbidden during capture. Handles live as long as the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from kiln.jit_kernels.compile.build import Built, build
from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.compile.ready import ready_guard
from kiln.jit_kernels.declare.arch import compute_capability, device_arch, gpu, target_of
from kiln.jit_kernels.declare.catalog import best_form
from kiln.jit_kernels.declare.errors import LateKernel, NoSuchKernel
from kiln.jit_kernels.declare.packing import ArgumentBlock
from kiln.jit_kernels.declare.parameters import Arguments, KernelValue
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import (
    Bound,
    KernelSpec,
    LaunchGeometry,
    Needs,
    Variant,
    check_needs,
    label,
)
from kiln.jit_kernels.launchers.choose import EARLY_ARCH, launcher
from kiln.jit_kernels.launchers.protocol import Launcher
from kiln.jit_kernels.toolchains.template import early_launch_hint

Run = Callable[[Arguments, Bound], None]  # runs an operator on a bound call


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


class Loaded(NamedTuple):
    """A variant of an operator on one device, and the function that runs it on a call."""

    kernel: LoadedKernel
    run: Run


def launch(spec: KernelSpec, a: Arguments) -> None:
    """Launch a spec's kernel, regardless of the toggles, on the current stream of its arguments.

    Raises LaunchError if the driver fails, and every error of ``load``.
    """
    bound = spec.bind(a)
    load(spec, bound.variant, a[spec.parameters.first_tensor].device).run(a, bound)


def at_graph_edge(device: torch.device) -> None:
    """Tell the launcher that a capture begins or ends, or that a graph was replayed.

    It concerns the current stream of a CUDA device. See ``Launcher.at_graph_edge``.
    """
    if _loaded(device.index):
        launcher().at_graph_edge(_current_stream()(device.index))


def load_kernels(
    specs: Sequence[KernelSpec],
    device: torch.device,
    needs: Needs = MappingProxyType({}),
    on_built: Callable[[str, Built], None] = lambda name, built: None,
) -> None:
    """Load all variants of some specs on a CUDA device, or those that a model runs.

    Raises NoSuchKernel if a kernel lacks a needed variant, and what ``load`` raises.
    """
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    for spec in specs:
        check_needs(spec, needs)
        for variant in spec.variants(needs):
            load(spec, variant, device, on_built)


def load(
    spec: KernelSpec,
    variant: Variant,
    device: torch.device,
    on_built: Callable[[str, Built], None] = lambda name, built: None,
) -> Loaded:
    """Return a variant on a CUDA device.

    The first call builds the variant, or finds it in the kernel cache, and loads it. If another
    spec replaces the operator's kernel on the device, that one is loaded. Raises NoSuchKernel if
    the kernel lacks the variant or does not support the device; also CompileError, SealedMiss,
    LaunchError, LateKernel and ToolchainMissing.
    """
    loaded, key = _loaded(device.index), (spec.name, *variant.values())
    if key in loaded:
        return loaded[key]
    arch = target_arch(device)
    _check_arch(spec, arch)
    check_needs(spec, variant)
    _refuse_during_capture(label(spec, variant))
    form = best_form(spec, variant, arch)
    name = label(form, variant)
    built = build(form, variant, arch, kernel_cache())
    with torch.cuda.device(device.index):
        torch.cuda.synchronize()  # make torch's own context current before the driver loads
        ready_guard().passes(name, "loaded")
        function = launcher().load(
            name, built.cubin, form.entry, form.shared_bytes(variant, gpu(device.index)),
            early_hint=_early_hint(form, arch),
        )  # fmt: skip
    kernel = LoadedKernel(name, function, form.c_types, launcher())
    loaded[key] = Loaded(kernel, _runner(form, kernel, device.index))
    on_built(label(spec, variant), built)
    return loaded[key]


def _runner(spec: KernelSpec, kernel: LoadedKernel, index: int) -> Run:
    """Return the function that launches a kernel on a bound call; it is called often."""
    geometry, kernel_values, stream = (
        spec.geometry,
        spec.parameters.kernel_values,
        _current_stream(),
    )
    device = gpu(index)

    def run(a: Arguments, bound: Bound) -> None:
        grid = geometry(bound.variant, bound.sizes, device)
        kernel.launch(grid, kernel_values(a, bound.derived), stream(index))

    return run


def _early_hint(spec: KernelSpec, arch: str) -> str:
    """Return the hint for an early launch of a kernel, "" if the GPU has no early launches."""
    return early_launch_hint(spec.source) if compute_capability(arch) >= EARLY_ARCH else ""


def _check_arch(spec: KernelSpec, arch: str) -> None:
    if spec.only_arch not in ("", arch):
        raise NoSuchKernel(f"{spec.name} runs only on {spec.only_arch}, and this is {arch}")
    if compute_capability(arch) < spec.min_arch:
        raise NoSuchKernel(f"{spec.name} needs sm_{spec.min_arch} or later, and this is {arch}")


def target_arch(device: torch.device) -> str:
    """Return the target to compile for: ``KILN_KERNEL_ARCH``, else the device's.

    Raises KernelError if the variable names none.
    """
    forced = settings().kernel_arch
    return target_of(forced) if forced else device_arch(device)


def _refuse_during_capture(name: str) -> None:
    """Raise LateKernel: the driver's own error would end the capture and not name the kernel."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise LateKernel(
            f"{name} would be loaded while a CUDA graph is captured, which CUDA forbids: call "
            f"kiln.jit_kernels.implementations.decide() before the capture"
        )


@cache
def _current_stream() -> Callable[[int], int]:
    """Return a function from a device's index to its current stream, as a CUstream.

    torch.cuda.current_stream creates an object and takes 2.6 µs, a fifth of a launch. Code that
    torch.compile generates uses the same function as this one.
    """
    raw: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda index: int(torch.cuda.current_stream(index).cuda_stream))


@cache
def _loaded(device_index: int) -> dict[tuple[str, ...], Loaded]:
    """Return the kernels loaded on a device, by operator name and variant values."""
    return {}
