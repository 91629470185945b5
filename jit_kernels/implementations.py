"""Choose the implementation of each operator, and record why; no other module chooses.

The choice is made for a device, an operator and a variant. It depends on the toggles and on what
can be loaded, not on the order of calls. The toggle of a family, ``KILN_<FAMILY>``, names one
implementation: it runs, or KernelError is raised. Under "auto" Kiln's own kernel runs if it has the
variant and can be loaded, else Triton's, else torch's operations. SealedMiss, BundleRefused and
LateKernel are always raised, because whoever runs the server must see them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

import torch

from kiln.jit_kernels.compile.open_cache import kernel_cache
from kiln.jit_kernels.compile.ready import ready_guard
from kiln.jit_kernels.compile.warmup import Outcome, jobs_for, warm_up
from kiln.jit_kernels.declare.errors import (
    BundleRefused,
    KernelError,
    LateKernel,
    NoSuchKernel,
    SealedMiss,
    ToolchainMissing,
)
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import KernelSpec, Needs, Variant, check_needs, label
from kiln.jit_kernels.launch import Run, load, target_arch
from kiln.jit_kernels.registry import triton_form
from kiln.jit_kernels.toolchains import host

log = logging.getLogger(__name__)

Implementation = Literal["jit", "triton", "torch", "host", "host-check"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Decision:
    """The implementation of a variant of an operator on a device, and the reason as text.

    If the operator's kernel lacks the variant, ``variant`` holds only the values that the model
    needs.
    """

    spec: KernelSpec
    variant: Variant
    implementation: Implementation
    reason: str
    run: Run = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Decisions:
    """The implementations of a model's operators on a device."""

    made: tuple[Decision, ...]

    def run_kernels(self, *families: str) -> bool:
        """Return whether any operator of these families runs a kernel, not torch's operations."""
        own = [one for one in self.made if one.spec.family in families]
        return any(one.implementation != "torch" for one in own)

    def summary(self) -> dict[str, str]:
        """Return family -> its implementation and the reason; variants that differ are named."""
        families: dict[str, dict[str, list[str]]] = {}
        for one in self.made:
            told = families.setdefault(one.spec.family, {})
            names = told.setdefault(f"{one.implementation}: {one.reason}", [])
            names.append(label(one.spec, one.variant))
        texts = {}
        for family, told in families.items():
            most, *rest = sorted(told, key=lambda text: -len(told[text]))
            others = [f"{', '.join(told[text])} by {text}" for text in rest]
            texts[family] = "; ".join([most, *others])
        return texts


_decided: dict[tuple[object, ...], Decision] = {}  # by device, operator and values of the variant


def decide(
    specs: Iterable[KernelSpec],
    device: torch.device,
    needs: Needs = MappingProxyType({}),
    progress: Progress = lambda stage, done, total: None,
) -> Decisions:
    """Choose, build and load the implementations of some specs for a model on a device.

    Called with all that a model can call, before the KV pool is sized. ``needs`` limits the
    variants to those that a model runs. ``progress`` is called with (stage, done, total) while
    kernels are built. Raises KernelError if a toggle names an implementation that cannot run; if
    possible, before anything is built.
    """
    specs = list(specs)
    operators = [spec for spec in specs if not spec.replaces]
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    with ready_guard().preparing():
        made = [
            _decide(spec, values, device)
            for spec in operators
            if not spec.has_unfused_path
            for values in spec.lacking(needs)
        ]
        if device.type == "cuda":
            _build_in_parallel(specs, device, needs, progress)
        made += [
            decision(spec, variant, device)
            for spec in operators
            for variant in spec.variants(needs)
        ]
    return Decisions(tuple(made))


def decision(spec: KernelSpec, variant: Variant, device: torch.device) -> Decision:
    """Return the implementation of a variant on a device; a GPU device must have an index.

    It is chosen and loaded on the first call. Raises KernelError as ``decide`` does.
    """
    key = (device, spec.name, *variant.values())
    if key not in _decided:
        _decided[key] = _decide(spec, variant, device)
    return _decided[key]


def run_if_chosen(spec: KernelSpec, variant: Variant, device: torch.device, a: Arguments) -> bool:
    """Run an operator unless torch is chosen for its variant; return whether it ran.

    Nor does it run if the variant was not chosen before the engine was ready: it would be compiled
    while serving.
    """
    was_chosen = (device, spec.name, *variant.values()) in _decided
    if not was_chosen and ready_guard().is_active:
        return False
    if decision(spec, variant, device).implementation == "torch":
        return False
    spec.operator(*a)
    return True


def may_fuse(*families: str) -> bool:
    """Return whether the toggles let one of Kiln's kernels do the work of several families."""
    return {settings().kernel_choice(one) for one in families} <= {"auto", "jit"}


def may_run_kernel(spec: KernelSpec, device: torch.device, needs: Needs) -> bool:
    """Return whether an operator has the variants of a model, and the toggles allow a kernel."""
    return not spec.lacking(needs) and _toggle(spec, device)[0] != "torch"


def run(spec: KernelSpec, a: Arguments) -> None:
    """Run an operator with the implementation chosen for its arguments' variant and device."""
    bound = spec.bind(a)
    device = a[spec.parameters.first_tensor].device
    made = _decided.get((device, spec.name, *bound.variant.values()))
    if made is None:
        made = decision(spec, bound.variant, device)
    made.run(a, bound)


def run_reference(spec: KernelSpec, a: Arguments) -> None:
    """Write the reference's results into the arguments that the operator mutates."""
    for name, result in spec.reference(a).items():
        getattr(a, name).copy_(result)


def _toggle(spec: KernelSpec, device: torch.device) -> tuple[str, str]:
    """Return the choice that holds for an operator on a device, and the setting that made it."""
    choice = settings().kernel_choice(spec.family)
    if choice == "auto" and device.type == "cpu" and settings().cpu_kernels == "torch":
        return "torch", "KILN_CPU_KERNELS=torch"
    return choice, settings().asked(spec.family)


def _decide(spec: KernelSpec, variant: Variant, device: torch.device) -> Decision:
    toggle, asked = _toggle(spec, device)
    if toggle != "auto":
        make = {"jit": _own, "triton": _triton, "torch": _torch}[toggle]
        try:
            implementation, _, call = make(spec, variant, device)
        except NoSuchKernel as error:
            raise NoSuchKernel(
                f"{asked} cannot be used here: {error}; unset {asked.partition('=')[0]}"
            ) from error
        return Decision(spec, variant, implementation, asked, call)
    why_not = []
    for whose, make in {"Kiln's": _own, "Triton's": _triton}.items():
        try:
            implementation, reason, call = make(spec, variant, device)
        except (SealedMiss, BundleRefused, LateKernel):
            raise
        except KernelError as error:
            why_not.append(f"{whose} kernels are unavailable: {error}")
        else:
            return Decision(spec, variant, implementation, "; ".join(why_not) or reason, call)
    return Decision(spec, variant, "torch", "; ".join(why_not), _torch(spec, variant, device)[2])


_Made = tuple[Implementation, str, Run]


def _own(spec: KernelSpec, variant: Variant, device: torch.device) -> _Made:
    """Return Kiln's own kernel, loaded; on a CPU, the host toolchain builds it on its first run."""
    if device.type == "cuda":
        return "jit", "compiled by NVRTC and loaded", load(spec, variant, device).run
    mode = settings().cpu_kernels
    if mode == "torch":
        raise NoSuchKernel("a CPU runs Kiln's kernels only under KILN_CPU_KERNELS=host")
    check_needs(spec, variant)
    checked = mode == "host-check"
    call: Run = lambda a, bound: host.run(spec, a, checked=checked, env=settings())  # noqa: E731
    return mode, f"KILN_CPU_KERNELS={mode}", call


def _triton(spec: KernelSpec, variant: Variant, device: torch.device) -> _Made:
    if device.type != "cuda":
        raise NoSuchKernel("Triton needs a GPU, and this is a CPU")
    form = triton_form(spec.family, spec.name, variant)
    return "triton", "compiled by Triton when it runs", lambda a, bound: form(a)


def _torch(spec: KernelSpec, variant: Variant, device: torch.device) -> _Made:
    return "torch", "", lambda a, bound: run_reference(spec, a)


def _build_in_parallel(
    specs: Sequence[KernelSpec], device: torch.device, needs: Needs, progress: Progress
) -> None:
    """Fill the kernel cache on all cores, so that loading kernels one by one needs no compile."""
    toggles = {spec.family: settings().kernel_choice(spec.family) for spec in specs}
    wanted = [spec for spec in specs if toggles[spec.family] in ("auto", "jit")]
    jobs = jobs_for(wanted, [target_arch(device)], needs)
    done = 0

    def tell(outcome: Outcome) -> None:
        nonlocal done
        done += 1
        progress("kernels", done, len(jobs))

    try:
        warm_up(jobs, kernel_cache(), settings().jit_jobs, tell)
    except ToolchainMissing as error:  # loading raises it again, as the reason
        log.warning("%s", error)
