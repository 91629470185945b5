"""Kernels of other installed libraries, called through their public interfaces.

An adapter takes the operator's arguments by name, so that its result can be checked against the
spec's reference before it is timed. If a library allocates its result, the adapter returns it,
because a copy would add to the time. A library is imported only if a kernel has an adapter for it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from kiln.jit_kernels.bench.peer_attention import ATTENTION
from kiln.jit_kernels.bench.peer_sampling import SAMPLING
from kiln.jit_kernels.bench.timing import Call
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import KernelSpec

Adapter = Callable[[KernelSpec, ModuleType], Callable[[Arguments], Call]]
LIBRARIES = ("flashinfer", "vllm", "sgl_kernel", "flash_attn", "liger_kernel")


def peer_forms(spec: KernelSpec) -> dict[str, Callable[[Arguments], Call] | str]:
    """Return library -> form of a kernel, or the reason why the library cannot be used.

    Libraries without an adapter for the kernel are left out.
    """
    forms: dict[str, Callable[[Arguments], Call] | str] = {}
    for library, (module, adapter) in ADAPTERS.get(spec.name, {}).items():
        if importlib.util.find_spec(library) is None:
            forms[library] = "not installed"
            continue
        try:
            forms[library] = adapter(spec, importlib.import_module(module))
        except Exception as error:  # another library may raise anything on import
            forms[library] = f"cannot be used: {type(error).__name__}: {error}"
    return forms


def versions() -> dict[str, str]:
    """Return library -> its version, or "not installed"."""
    found = {}
    for library in LIBRARIES:
        if importlib.util.find_spec(library) is None:
            found[library] = "not installed"
            continue
        names = importlib.metadata.packages_distributions().get(library, [])
        found[library] = importlib.metadata.version(names[0]) if names else "of unknown version"
    return found


def _function(run: Callable[..., Any]) -> Adapter:
    """Return the adapter of ``run(module, …)``; its other parameters are operator arguments."""
    wanted = list(inspect.signature(run).parameters)[1:]

    def adapt(spec: KernelSpec, module: ModuleType) -> Callable[[Arguments], Call]:
        return lambda a: partial(run, module, *(getattr(a, name) for name in wanted))

    return adapt


def _flashinfer_rms_norm(
    flashinfer: ModuleType, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    flashinfer.norm.rmsnorm(x, weight, eps, out=out)


def _flashinfer_fused(
    flashinfer: ModuleType,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> None:
    flashinfer.norm.fused_add_rmsnorm(x, residual, weight, eps)


def _flashinfer_and_mul(name: str) -> Callable[..., None]:
    def run(flashinfer: ModuleType, out: torch.Tensor, x: torch.Tensor) -> None:
        getattr(flashinfer.activation, name)(x, out=out)

    return run


def _sgl_rms_norm(
    sgl: ModuleType, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    sgl.rmsnorm(x, weight, eps, out=out)


def _sgl_fused(
    sgl: ModuleType, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    sgl.fused_add_rmsnorm(x, residual, weight, eps)


def _sgl_and_mul(name: str) -> Callable[..., None]:
    def run(sgl: ModuleType, out: torch.Tensor, x: torch.Tensor) -> None:
        getattr(sgl, name)(x, out)

    return run


def _vllm_rms_norm(
    ops: ModuleType, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    ops.rms_norm(out, x, weight, eps)


def _vllm_fused(
    ops: ModuleType, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> None:
    ops.fused_add_rms_norm(x, residual, weight, eps)


def _vllm_and_mul(name: str) -> Callable[..., None]:
    def run(ops: ModuleType, out: torch.Tensor, x: torch.Tensor) -> None:
        getattr(torch.ops._C, name)(out, x)  # registered by importing vllm._custom_ops

    return run


def _liger_rms_norm(
    liger: ModuleType, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    result: torch.Tensor = liger.liger_rms_norm(x, weight, eps, 0.0, "llama", False)
    return result


def _norms() -> dict[str, dict[str, tuple[str, Adapter]]]:
    vllm, liger = "vllm._custom_ops", "liger_kernel.transformers.functional"
    return {
        "rms_norm": {
            "flashinfer": ("flashinfer", _function(_flashinfer_rms_norm)),
            "sgl_kernel": ("sgl_kernel", _function(_sgl_rms_norm)),
            "vllm": (vllm, _function(_vllm_rms_norm)),
            "liger_kernel": (liger, _function(_liger_rms_norm)),
        },
        "fused_add_rms_norm": {
            "flashinfer": ("flashinfer", _function(_flashinfer_fused)),
            "sgl_kernel": ("sgl_kernel", _function(_sgl_fused)),
            "vllm": (vllm, _function(_vllm_fused)),
        },
    }


def _activations() -> dict[str, dict[str, tuple[str, Adapter]]]:
    return {
        name: {
            "flashinfer": ("flashinfer", _function(_flashinfer_and_mul(name))),
            "sgl_kernel": ("sgl_kernel", _function(_sgl_and_mul(name))),
            "vllm": ("vllm._custom_ops", _function(_vllm_and_mul(name))),
        }
        for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
    }


ADAPTERS: Mapping[str, Mapping[str, tuple[str, Adapter]]] = MappingProxyType(
    {**_norms(), **_activations(), **ATTENTION, **SAMPLING}
)
