"""One variant to a cubin, through the kernel cache."""

from __future__ import annotations

import time
from dataclasses import dataclass

from kiln.cache.keys import content_key, digest_of
from kiln.cache.store import Store
from kiln.jit_kernels.compile.template import Unit, render
from kiln.jit_kernels.spec import KernelSpec, Variant, label
from kiln.jit_kernels.toolchains import nvrtc


@dataclass(frozen=True, slots=True)
class Built:
    """A cubin, whether it was on disk already, and the seconds it took to get it."""

    cubin: bytes
    hit: bool
    seconds: float


def key_of(spec: KernelSpec, unit: Unit, arch: str) -> str:
    """Return the content key of a build: all that can change its bytes, and nothing else.

    No path of this machine, no time, no environment, no driver. Raises ToolchainMissing.
    """
    fields = [
        ("kind", b"cubin"),
        ("arch", arch.encode()),
        ("toolchain", nvrtc.identity().encode()),
        *(("option", option.encode()) for option in nvrtc.options(arch)),
        ("entry", spec.entry.encode()),
        ("program", unit.name.encode()),
        ("source", digest_of(unit.text.encode())),
    ]
    for name, text in unit.headers.items():
        fields += [("header", name.encode()), ("header-text", digest_of(text.encode()))]
    return content_key(fields)


def build(spec: KernelSpec, variant: Variant, arch: str, store: Store) -> Built:
    """Return the cubin of a variant for ``arch``: from the store, else from NVRTC.

    A hit does not load NVRTC. What was just compiled is used as it is and never read back.
    Raises CompileError and ToolchainMissing.
    """
    start = time.perf_counter()
    unit = render(spec, variant)
    key = key_of(spec, unit, arch)
    cached = store.get(key)
    if cached is not None:
        return Built(cached, True, time.perf_counter() - start)
    name = label(spec, variant)
    cubin = nvrtc.compile_cubin(name, unit, arch)
    header = {
        "kernel": spec.name,
        "variant": dict(variant),
        "arch": arch,
        "toolchain": nvrtc.identity(),
        "options": nvrtc.options(arch),
    }
    store.put(key, cubin, header)
    return Built(cubin, False, time.perf_counter() - start)
