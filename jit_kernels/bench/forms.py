"""The ways to run a kernel, each as a function from the operator's arguments to a call.

What cannot run here is a text that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from kiln.jit_kernels.bench.peer_attention import PAGED, sdpa_form
from kiln.jit_kernels.bench.peers import peer_forms
from kiln.jit_kernels.errors import NoSuchKernel
from kiln.jit_kernels.implementations import run_reference
from kiln.jit_kernels.launch import launch
from kiln.jit_kernels.parameters import Arguments
from kiln.jit_kernels.settings import settings
from kiln.jit_kernels.spec import KernelSpec
from kiln.jit_kernels.timing import Call
from kiln.jit_kernels.toolchains import host
from kiln.jit_kernels.triton_forms import triton_form

Form = Callable[[Arguments], Call]
OWN = {"cuda": "jit", "cpu": "host"}  # the name of Kiln's own kernel on a device


def forms_of(
    spec: KernelSpec, device: str, *, compiled: bool = True, peers: bool = False
) -> Mapping[str, Form | str]:
    """Return name -> form for a spec on "cuda" or "cpu"; Kiln's own kernel comes first.

    "torch" is the reference run eagerly, "compile" the same through torch.compile, "sdpa" torch's
    own attention on keys that lie in one piece. On a CPU there
    are Kiln's kernel under the host toolchain and the reference alone: a test of the bench.
    """
    if device == "cpu":
        return {"host": of(partial(_on_host, spec)), "torch": of(partial(run_reference, spec))}
    forms: dict[str, Form | str] = {
        "jit": lambda a: partial(launch, spec, a),
        "torch": of(partial(run_reference, spec)),
        "compile": _compiled(spec) if compiled else "not asked for",
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
    # Compiled code of earlier kernels counts against the limit of recompiles, past which a call
    # would run eagerly and be timed as what it is not.
    torch.compiler.reset()
    return of(torch.compile(partial(run_reference, spec), dynamic=False))


def _triton(spec: KernelSpec) -> Form | str:
    try:
        return of(triton_form(spec.family, spec.name))
    except NoSuchKernel as error:
        return str(error)
