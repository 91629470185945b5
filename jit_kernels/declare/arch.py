"""GPU architectures as compilation targets."""

from __future__ import annotations

import re
from functools import cache

import torch

from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.spec import Gpu

# One target per supported GPU generation; ``kiln warmup --arch all`` builds for these.
ALL_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
_CAPABILITIES = (75, 80, 86, 87, 88, 89, 90, 100, 101, 103, 110, 120, 121)  # of all GPUs
_ARCH = re.compile(r"sm_(\d{2,3})([af]?)")
_FIRST_WITH = {"a": 90, "f": 100}  # suffix -> the first architecture that has it


def compute_capability(arch: str) -> int:
    """Return the number in a target: 90 for ``sm_90a``. Raises KernelError on any other text."""
    match = _ARCH.fullmatch(arch)
    if match is None or int(match[1]) < 75:
        raise KernelError(f"{arch!r} is not a target; use one such as {', '.join(ALL_ARCHS)}")
    return int(match[1])


def target_of(arch: str) -> str:
    """Return the target that Kiln uses on the GPUs of an architecture: ``sm_90a`` for ``sm_90``.

    A suffix that the architecture does not have is left out. Raises KernelError for an
    architecture that no GPU has.
    """
    capability = compute_capability(arch)
    if capability not in _CAPABILITIES:
        near = min(ALL_ARCHS, key=lambda one: abs(compute_capability(one) - capability))
        raise KernelError(
            f"{arch!r}: no GPU has this architecture; did you mean {near}? Targets are "
            f"{', '.join(ALL_ARCHS)}"
        )
    suffix = arch.removeprefix(f"sm_{capability}")
    if suffix and capability >= _FIRST_WITH[suffix]:
        return arch
    return _target(*divmod(capability, 10))


def _has_features(major: int) -> bool:
    """Whether GPUs of a major version need the ``a`` suffix, which enables wgmma and tcgen05."""
    return major in (9, 10, 11)


def device_arch(device: torch.device) -> str:
    """Return the target of a CUDA device.

    Hopper and data-centre Blackwell use the ``a`` suffix, which enables wgmma and tcgen05.
    """
    return _target(*torch.cuda.get_device_capability(device))


def _target(major: int, minor: int) -> str:
    return f"sm_{major}{minor}{'a' if _has_features(major) else ''}"


def index_of(device: torch.device) -> int:
    """Return the index of a CUDA device, of the current one if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index


@cache
def gpu(device_index: int) -> Gpu:
    """Return the properties of a CUDA device that launch geometries depend on."""
    found = torch.cuda.get_device_properties(device_index)
    return Gpu(found.multi_processor_count, found.shared_memory_per_block_optin)  # type: ignore[attr-defined]
