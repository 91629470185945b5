"""Cost of module loading, cost per call of each launcher, and the guard against late loading."""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kiln.jit_kernels.compile.build import build
from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.compile.warmup import jobs_for
from kiln.jit_kernels.declare.arch import gpu
from kiln.jit_kernels.declare.errors import LateKernel, ToolchainMissing
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import KernelSpec, LaunchGeometry, label
from kiln.jit_kernels.launch import LoadedKernel, load_kernels, target_arch
from kiln.jit_kernels.launchers.cuda_python import CudaPythonLauncher
from kiln.jit_kernels.launchers.cupy_module import CuPyLauncher
from kiln.jit_kernels.registry import all_specs, find_spec
from kiln.jit_kernels.toolchains.cubin import resources_of
from kiln.jit_kernels.toolchains.template import early_launch_hint

Row = dict[str, Any]
_LAUNCHERS: dict[str, Callable[[], Any]] = {
    "cuda_python": CudaPythonLauncher,
    "cupy": CuPyLauncher,
}
_EARLY = ("cuda_python",)  # launchers that support programmatic dependent launch
_SHARED_UNASKED = 48 << 10  # bytes that a block gets without setting a function attribute
_KINDS = {"int64": ctypes.c_int64, "int32": ctypes.c_int32, "float": ctypes.c_float}


def launch_functions(spec: KernelSpec, a: Arguments) -> dict[str, Callable[[], Any] | str]:
    """Return launcher -> one launch of a kernel on packed arguments, or why it cannot run."""
    device = torch.device("cuda", torch.cuda.current_device())
    bound = spec.bind(a)
    values = spec.kernel_values(a, bound)
    geometry = spec.geometry(bound.variant, bound.sizes, gpu(device.index))
    stream = torch.cuda.current_stream().cuda_stream
    cubin = build(spec, bound.variant, target_arch(device), kernel_cache()).cubin
    torch.cuda.synchronize()
    found: dict[str, Callable[[], Any] | str] = {}
    for name, make in _LAUNCHERS.items():
        try:
            launcher = make()
        except ToolchainMissing as error:
            found[name] = f"not measured: {error}"
            continue
        for title, hint in ((name, ""), (f"{name}_early", early_launch_hint(spec.source))):
            if hint and name not in _EARLY:
                continue
            shared = spec.shared_bytes(bound.variant, gpu(torch.cuda.current_device()))
            function = launcher.load(name, cubin, spec.entry, shared, early_hint=hint)
            kernel = LoadedKernel(name, function, spec.c_types, launcher)
            found[title] = lambda kernel=kernel: kernel.launch(geometry, values, stream)
    found["cuda_core"] = _cuda_core(spec, cubin, geometry, values, stream)
    return found


def _cuda_core(
    spec: KernelSpec, cubin: bytes, geometry: LaunchGeometry, values: Sequence[Any], stream: int
) -> Callable[[], Any] | str:
    """Return a launch through cuda.core, which packs the arguments itself."""
    try:
        from cuda import core
    except ImportError as error:
        return f"not measured: {error}"
    shared = geometry.shared_bytes + resources_of(cubin)[spec.entry].shared_bytes
    if shared > _SHARED_UNASKED:
        return f"not measured: needs {shared} bytes of shared memory"
    device = core.Device(torch.cuda.current_device())
    device.set_current()
    kernel = core.ObjectCode.from_cubin(cubin).get_kernel(spec.entry)
    config = core.LaunchConfig(
        grid=geometry.grid, block=geometry.block, shmem_size=geometry.shared_bytes
    )
    queue = core.Stream.from_handle(stream)

    def call() -> None:
        plain = [_plain(kind, value) for kind, value in zip(spec.c_types, values, strict=True)]
        core.launch(queue, config, kernel, *plain)

    return call


def _plain(kind: str, value: Any) -> Any:
    if kind != "pointer":
        return _KINDS[kind](value)
    return value.data_ptr() if isinstance(value, torch.Tensor) else 0  # None: an absent tensor


def loading(args: argparse.Namespace) -> list[Row]:
    """Load every kernel through each launcher: milliseconds and device memory of a cubin."""
    device = torch.device("cuda", torch.cuda.current_device())
    arch = target_arch(device)
    jobs = [(job.spec, job.variant) for job in jobs_for(all_specs().values(), [arch])]
    cubins = [build(spec, variant, arch, kernel_cache()).cubin for spec, variant in jobs]
    rows: list[Row] = []
    for name, make in _LAUNCHERS.items():
        try:
            launcher = make()
        except ToolchainMissing as error:
            rows.append({"launcher": name, "loaded": f"not measured: {error}"})
            continue
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info(device)[0]
        kept, times = [], []
        for (spec, variant), cubin in zip(jobs, cubins, strict=True):
            shared = spec.shared_bytes(variant, gpu(device.index))
            start = time.perf_counter()
            kept.append(launcher.load(label(spec, variant), cubin, spec.entry, shared))
            times.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info(device)[0]
        row = {
            "launcher": name,
            "arch": arch,
            "loaded": len(kept),
            "cubin_bytes": sum(map(len, cubins)),
            "median_ms": round(sorted(times)[len(times) // 2], 3),
            "largest_ms": round(max(times), 3),
            "device_bytes": taken,  # of all modules; the driver allocates in steps of 2 MiB
            "ok": len(kept) == len(jobs),
        }
        rows.append(row)
    return rows


def late_load(args: argparse.Namespace) -> list[Row]:
    """Try to load a kernel during graph capture: it must be refused and the capture continue."""
    # A new name, so that the kernel is not loaded yet in any case.
    spec = dataclasses.replace(find_spec("rms_norm"), name="rms_norm_late")
    x = torch.zeros(8, device="cuda")
    said = ""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        try:
            load_kernels([spec], torch.device("cuda", torch.cuda.current_device()))
        except LateKernel as error:
            said = str(error)
        x.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    whole = bool((x == 2).all())
    return [{"guard": said or "silent", "capture_survived": whole, "ok": bool(said) and whole}]
