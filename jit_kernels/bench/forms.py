"""The implementations ("forms") of a kernel: functions from the operator's arguments to a call.

A form that cannot run on this machine is a string with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from kiln.jit_kernels.bench.peer_attention import PAGED, sdpa_form
from kiln.jit_kernels.bench.peers import peer_forms
from kiln.jit_kernels.bench.timing import Call
from kiln.jit_kernels.declare.errors import NoSuchKernel
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.declare.spec import KernelSpec
from kiln.jit_kernels.implementations import run_reference
from kiln.jit_kernels.launch import launch
from kiln.jit_kernels.registry import triton_form
from kiln.jit_kernels.toolchains import host

Form = Callable[[Arguments], Call]
OWN = {"cuda": "jit", "cpu": "host"}  # the form that is Kiln's own kernel


def forms_of(
    spec: KernelSpec, device: str, *, compiled: bool = True, peers: bool = False
) -> Mapping[str, Form | str]:
    """Return name -> form for a spec on "cuda" or "cpu"; Kiln's own kernel is first.

    "torch" is the reference in eager mode, "compile" the same through torch.compile, "sdpa" torch's
    own attention on contiguous keys. A CPU, which only serves to test the benchmark, has just
    Kiln's kernel under the host toolchain and the reference.
    """
    if device == "cpu":
        return {"host": of(partial(_on_host, spec)), "torch": of(partial(run_reference, spec))}
    forms: dict[str, Form | str] = {
        "jit": lambda a: partial(launch, spec, a),
        "torch": of(partial(run_reference, spec)),
        "compile": _compiled(spec) if compiled else "not requested",
        "triton": _triton(spec),
    }
    if spec.name in PAGED:
        forms["sdpa"] = sdpa_form(spec)
    return forms | peer_forms(spec) if peers else forms


def of(run: Callable[[Arguments], object]) -> Form:
    """Return the form of a function that takes the operator's arguments."""
    return lambda a: partial(run, a)


def _on_host(spec: KernelSpec, a: Arguments) -> None:
    host.run(spec, a, env=settings())


def _compiled(spec: KernelSpec) -> Form:
    # Compiled code of earlier kernels counts towards the recompile limit. Past the limit a call
    # would silently run in eager mode.
    torch.compiler.reset()
    return of(torch.compile(partial(run_reference, spec), dynamic=False))


def _triton(spec: KernelSpec) -> Form | str:
    try:
        return of(triton_form(spec.family, spec.name))
    except NoSuchKernel as error:
        return str(error)
