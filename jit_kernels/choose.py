"""Which implementation of a kernel family runs on the GPU, and why. Decided once a process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Literal

import torch

from kiln.jit_kernels.catalog import operators_of
from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.compile.warmup import Outcome, jobs_for, warm_up
from kiln.jit_kernels.errors import (
    BundleRefused,
    KernelError,
    LateKernel,
    SealedMiss,
    ToolchainMissing,
)
from kiln.jit_kernels.launch import load_kernels, target_arch
from kiln.jit_kernels.ready import ready_guard
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import KernelSpec, Needs
from kiln.jit_kernels.triton_forms import has_triton

log = logging.getLogger(__name__)

Implementation = Literal["jit", "triton", "torch"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs for a family, and the reason in words."""

    family: str
    implementation: Implementation
    reason: str


def choice(family: str, needs: Needs = MappingProxyType({})) -> Choice:
    """Return what runs for a family on this machine's GPU; loads its kernels when that is "jit".

    The first call decides, and with ``needs`` loads only what a model runs.

    A toggle is obeyed or refused, never bent: raises KernelError when what it names cannot run.
    Under "auto" Kiln's own kernels run where they load, else Triton's, else torch's, with the
    reason why not. A sealed cache that lacks a kernel and a bundle that cannot be believed are
    never passed over: raises SealedMiss, BundleRefused.
    """
    decided = _decided()
    if family not in decided:
        decided[family] = _decide(family, needs)
    return decided[family]


@cache
def _decided() -> dict[str, Choice]:
    return {}


def _decide(family: str, needs: Needs) -> Choice:
    toggle = settings().kernel_choice(family)
    name = f"KILN_{family.upper()}"
    if toggle != "auto":
        reason = f"{name}={toggle}"
        if toggle == "jit" and torch.cuda.is_available():
            _load(family, needs)
        if toggle == "triton" and not has_triton(family):
            raise KernelError(f"{reason}, but there is no Triton here for {family}")
        return Choice(family, toggle, reason)
    if not torch.cuda.is_available():
        return Choice(family, "torch", "no CUDA device")
    try:
        _load(family, needs)
    except (SealedMiss, BundleRefused, LateKernel):
        raise
    except KernelError as error:
        if has_triton(family):
            return Choice(family, "triton", f"Kiln's kernels are out: {error}")
        return Choice(family, "torch", f"Kiln's kernels are out and no Triton here: {error}")
    return Choice(family, "jit", "compiled by NVRTC and loaded")


def prepare(
    specs: Iterable[KernelSpec],
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
    needs: Needs = MappingProxyType({}),
) -> list[Choice]:
    """Decide for the families of some specs, building and loading what was chosen.

    Called with every spec before the KV pool is sized.
    ``needs`` limits that to what a model runs. ``progress`` hears of (stage, done,
    total) while kernels are built. Raises KernelError when a toggle names what cannot run.
    """
    specs = list(specs)
    families = dict.fromkeys(spec.family for spec in specs)
    wanted = [spec for spec in specs if settings().kernel_choice(spec.family) in ("auto", "jit")]
    with ready_guard().preparing():
        if wanted and torch.cuda.is_available():
            _build_in_parallel(wanted, progress, needs)
        choices = [choice(family, needs) for family in families]
        for one in choices:  # decided for another device or model before: this one's are missing
            if one.implementation == "jit" and torch.cuda.is_available():
                _load(one.family, needs)
        return choices


def _build_in_parallel(
    specs: list[KernelSpec],
    progress: Callable[[str, int, int], None],
    needs: Needs,
) -> None:
    """Fill the kernel cache with all cores, so that loading one by one finds everything there."""
    arch = target_arch(torch.device("cuda", torch.cuda.current_device()))
    jobs = jobs_for(specs, [arch], needs)
    done = 0

    def tell(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        progress("kernels", done, len(jobs))

    try:
        warm_up(jobs, kernel_cache(), settings().jit_jobs, tell)
    except ToolchainMissing as error:  # loading says it again, as the reason of a choice
        log.warning("%s", error)


def _load(family: str, needs: Needs) -> None:
    specs = [
        spec
        for spec in operators_of(family)
        if not (spec.optional and next(spec.variants(needs), None) is None)
    ]
    load_kernels(specs, torch.device("cuda", torch.cuda.current_device()), needs)
