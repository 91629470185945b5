"""Which implementation of a kernel family runs on the GPU, and why. Decided once a process."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from kiln.jit_kernels.errors import KernelError
from kiln.jit_kernels.launch import load_kernels
from kiln.jit_kernels.registry import all_specs, families
from kiln.jit_kernels.settings import settings

Implementation = Literal["jit", "triton", "torch"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs for a family, and the reason in words."""

    family: str
    implementation: Implementation
    reason: str


@cache
def choice(family: str) -> Choice:
    """Return what runs for a family on this machine's GPU; loads its kernels when that is "jit".

    A toggle is obeyed or refused, never bent: raises KernelError when what it names cannot run.
    Under "auto" Kiln's own kernels run where they load, else Triton's, else torch's, with the
    reason why not.
    """
    toggle = settings().kernel_choice(family)
    name = f"KILN_{family.upper()}"
    if toggle != "auto":
        reason = f"{name}={toggle}"
        if toggle == "jit" and torch.cuda.is_available():
            _load(family)
        if toggle == "triton" and not _has_triton(family):
            raise KernelError(f"{reason}, but there is no Triton here for {family}")
        return Choice(family, toggle, reason)
    if not torch.cuda.is_available():
        return Choice(family, "torch", "no CUDA device")
    try:
        _load(family)
    except KernelError as error:
        if _has_triton(family):
            return Choice(family, "triton", f"Kiln's kernels are out: {error}")
        return Choice(family, "torch", f"Kiln's kernels are out and no Triton here: {error}")
    return Choice(family, "jit", "compiled by NVRTC and loaded")


def prepare() -> list[Choice]:
    """Decide for every family, loading what was chosen; call before the KV pool is sized."""
    return [choice(family) for family in families()]


def _load(family: str) -> None:
    specs = [spec for spec in all_specs().values() if spec.family == family]
    load_kernels(specs, torch.device("cuda", torch.cuda.current_device()))


def _has_triton(family: str) -> bool:
    module = f"kiln.jit_kernels.triton_ops.{family}"
    return (
        importlib.util.find_spec("triton") is not None
        and importlib.util.find_spec(module) is not None
    )
