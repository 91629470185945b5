"""Select the targets and the kernels of a command."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kiln.jit_kernels.compile.warmup import Job
    from kiln.jit_kernels.declare.spec import KernelSpec


def add_arch_argument(parser: argparse.ArgumentParser) -> None:
    """Declare ``--arch``."""
    parser.add_argument(
        "--arch",
        metavar="LIST",
        help="comma-separated targets such as sm_80,sm_90a, or all. Default: "
        "KILN_KERNEL_ARCH, else this machine's GPUs, else all",
    )


def wanted_archs(text: str | None) -> list[str]:
    """Return the targets of a flag, or its default targets, without duplicates.

    Raises KernelError for one that no GPU has.
    """
    import torch

    from kiln.jit_kernels.declare.arch import ALL_ARCHS, device_arch, target_of
    from kiln.jit_kernels.declare.settings import settings

    text = text or settings().kernel_arch
    if text is None and torch.cuda.is_available():
        count = torch.cuda.device_count()
        return sorted({device_arch(torch.device("cuda", index)) for index in range(count)})
    if text is None or text == "all":
        return list(ALL_ARCHS)
    named = [arch.strip() for arch in text.split(",")]
    targets = [target_of(arch) for arch in named]
    for arch, target in zip(named, targets, strict=True):
        if arch != target:
            print(f"{arch}: taken as {target}, the target of these GPUs", file=sys.stderr)
    return list(dict.fromkeys(targets))


def compiled_archs(text: str | None) -> list[str]:
    """Return the targets of a flag, or its default targets, for a command that compiles.

    Those of "all" that NVRTC does not know are left out, and named on stderr. Raises KernelError
    for another one, whose compiles would all fail.
    """
    from kiln.jit_kernels.declare.arch import ALL_ARCHS, compute_capability
    from kiln.jit_kernels.declare.errors import KernelError, ToolchainMissing
    from kiln.jit_kernels.toolchains import nvrtc

    archs = wanted_archs(text)
    try:
        known = nvrtc.known_capabilities()
    except ToolchainMissing:  # all kernels may be in a bundle
        return archs
    unknown = [arch for arch in archs if compute_capability(arch) not in known]
    if not unknown:
        return archs
    there = ", ".join(f"sm_{one}" for one in known)
    told = f"NVRTC {nvrtc.version()} does not compile for {', '.join(unknown)}; it knows {there}"
    if archs != list(ALL_ARCHS):
        raise KernelError(f"{told}: leave it out, or install another NVRTC")
    print(told, file=sys.stderr)
    return [arch for arch in archs if arch not in unknown]


def declared_jobs(arch: str | None) -> list[Job]:
    """Return every declared program for the targets of ``--arch``. Raises KernelError."""
    from kiln.jit_kernels.compile.warmup import jobs_for
    from kiln.jit_kernels.registry import all_specs

    return jobs_for(all_specs().values(), wanted_archs(arch))


def specs_named(name: str) -> list[KernelSpec]:
    """Return the kernel with a name, or all kernels for "all". Raises KernelError."""
    from kiln.jit_kernels.declare.errors import KernelError
    from kiln.jit_kernels.registry import all_specs

    specs = all_specs()
    if name == "all":
        return list(specs.values())
    if name not in specs:
        raise KernelError(f"no kernel is named {name!r}; there are {', '.join(sorted(specs))}")
    return [specs[name]]
