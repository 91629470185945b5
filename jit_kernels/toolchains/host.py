"""The host toolchain: compile a kernel's own source with g++ or clang++ and run it on the CPU.

Plain builds are for correctness and for machines without a GPU. Checked builds also detect data
races by scope, out-of-bounds accesses, misaligned vectors and uninitialised shared memory.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from kiln.cache.disk.root import cache_root
from kiln.cache.env import Env
from kiln.jit_kernels.declare.errors import LaunchError
from kiln.jit_kernels.declare.parameters import Arguments
from kiln.jit_kernels.declare.spec import HOST_GPU, KernelSpec, Variant, label
from kiln.jit_kernels.toolchains.host_build import Recipe, find_compiler
from kiln.jit_kernels.toolchains.host_runtime import HEADERS, load_library, runtime
from kiln.jit_kernels.toolchains.host_world import HostKernel, World
from kiln.jit_kernels.toolchains.template import Unit, header_path, read_source, render

_ENTRY, _CLUSTER = "kiln_host_entry", "kiln_host_cluster"
_SHARED_BYTES = 48 * 1024  # dynamic shared memory per block, unless the spec asks for more
_CLUSTER_DIMS = re.compile(r"\bKILN_CLUSTER\s*\(([^()]*)\)")
# -nostdlib leaves out the sanitizers' runtimes; Kiln's runtime implements their hooks.
_FLAGS = (
    *("-std=c++20", "-fPIC", "-shared", "-nostdlib", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti", "-ffp-contract=off", "-Wno-unknown-pragmas"),
)
# Only the checker's reports need line numbers, which are a fifth of the compile time.
# DWARF 4: binutils before 2.42 reads the first file of g++'s DWARF 5 tables as main.cpp.
# -Og compiles in two thirds of the time of -O1; its code runs a fifth slower.
_CHECKED = (
    *("-Og", "-g1", "-gdwarf-4"),
    "-fsanitize=thread,bounds,shift,integer-divide-by-zero",
)
# A report can name the caller of an access only if the access was inlined, and g++ -Og inlines
# little. -fira-region=one saves 7 % of the compile time.
_CHECKED_GCC = (
    *("-finline-functions-called-once", "--param=early-inlining-insns=30"),
    "-fira-region=one",
)
_PLAIN = ("-O2",)


def load(spec: KernelSpec, variant: Variant, *, checked: bool, env: Env) -> HostKernel:
    """Return a variant, ready to run. It is compiled if it is not on disk.

    Raises CompileError and ToolchainMissing.
    """
    items = tuple(sorted(variant.items()))
    return _load(spec, items, checked, env.host_compiler, cache_root(env))


def prepare(work: Iterable[tuple[KernelSpec, Variant]], *, checked: bool, env: Env) -> None:
    """Load many variants in parallel: each compiler is its own process."""
    jobs = env.jit_jobs or min(os.cpu_count() or 1, 8)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda item: load(*item, checked=checked, env=env), work))


def build(
    unit: Unit, entry: str, c_types: Sequence[str], *, name: str, checked: bool, env: Env
) -> HostKernel:
    """Compile a translation unit with an ``extern "C"`` kernel named ``entry``.

    ``c_types``: the types of its parameters. Raises CompileError and ToolchainMissing.
    """
    return _build(unit, entry, tuple(c_types), name, checked, env.host_compiler, cache_root(env))


def run(spec: KernelSpec, a: Arguments, *, checked: bool = False, seed: int = 0, env: Env) -> None:
    """Run a spec's kernel on the operator's arguments. They are CPU tensors, written in place.

    Raises CompileError, ToolchainMissing, LaunchError, and HostFault on an error in the kernel.
    """
    bound = spec.bind(a)
    launch(load(spec, bound.variant, checked=checked, env=env), spec, a, seed=seed)


def launch(kernel: HostKernel, spec: KernelSpec, a: Arguments, *, seed: int = 0) -> int:
    """Run a loaded kernel as ``run`` does; return the number of thread switches.

    A launch for one GPU of several waits for other processes, which run the other ranks.
    Raises LaunchError and HostFault.
    """
    bound = spec.bind(a)
    geometry = spec.geometry(bound.variant, bound.sizes, HOST_GPU)
    most = max(spec.shared_bytes(bound.variant, HOST_GPU), _SHARED_BYTES)
    if geometry.shared_bytes > most:
        raise LaunchError(
            f"{kernel.name}: a launch asks for {geometry.shared_bytes} bytes of dynamic shared "
            f"memory; the limit is {most}: raise the spec's shared_bytes"
        )
    world = World(seed=seed, checked=kernel.checked, processes=geometry.one_gpu_of_several)
    world.enqueue(0, kernel, geometry, spec.kernel_values(a, bound))
    return world.run()


@cache
def _load(
    spec: KernelSpec,
    items: tuple[tuple[str, str], ...],
    checked: bool,
    compiler: str,
    root: Path | None,
) -> HostKernel:
    variant = dict(items)
    unit, name = render(spec, variant), label(spec, variant)
    return _build(unit, spec.entry, spec.c_types, name, checked, compiler, root)


def _build(
    unit: Unit,
    entry: str,
    c_types: tuple[str, ...],
    name: str,
    checked: bool,
    compiler: str,
    root: Path | None,
) -> HostKernel:
    # #line: the thunk is in main.cpp, not in the template.
    thunk = (
        f'\n#line 1 "main.cpp"\nextern "C" CUDA_HOST_API void {_ENTRY}(void** parameters) '
        f"{{ cuda_host::Entry<&{entry}>::call(parameters); }}\n"
    )
    dims = _CLUSTER_DIMS.search(unit.text)
    if dims:
        thunk += (
            f'extern "C" {{ CUDA_HOST_API extern const unsigned {_CLUSTER}[3] = {{{dims[1]}}}; }}\n'
        )
    files = {f"kernel_sources/{header_path(name)}": text for name, text in unit.headers.items()}
    files |= {f"kernel_sources/{header}": read_source(header) for header in HEADERS}
    recipe = Recipe(
        f"{name} (host{', checked' if checked else ''})",
        unit.text + thunk,
        files,
        ("kernel_sources/include", "kernel_sources", "kernel_sources/host"),
        (*_FLAGS, *(_CHECKED if checked else _PLAIN), *_only_gcc(compiler, checked)),
    )
    loaded = runtime(compiler, root)  # before the kernel, whose symbols it defines
    library = load_library(recipe, compiler, root, ctypes.RTLD_LOCAL)
    address = ctypes.cast(getattr(library, _ENTRY), ctypes.c_void_p).value
    assert address is not None
    cluster = _cluster(library, name) if dims else (1, 1)
    return HostKernel(name, address, c_types, checked, loaded, cluster)


def _cluster(library: ctypes.CDLL, name: str) -> tuple[int, int]:
    """Return the kernel's cluster size in blocks, in x and y. Raises LaunchError."""
    sizes = tuple((ctypes.c_uint * 3).in_dll(library, _CLUSTER))
    if 0 in sizes or sum(size > 1 for size in sizes) > 1 or sizes[2] > 1:
        raise LaunchError(f"{name}: KILN_CLUSTER{sizes} must be (n, 1, 1) or (1, n, 1) with n > 0")
    return sizes[:2]


def _only_gcc(compiler: str, checked: bool) -> tuple[str, ...]:
    # g++ makes the statics of template functions unique in the process, so two kernels would share
    # __shared__ variables of the same name. It turns loops into memset calls, which no hook sees.
    # Variable tracking for debuggers costs a fifth of the compile time, garbage collection a
    # twentieth. clang does none of this and rejects the options.
    if find_compiler(compiler).is_clang:
        return ()
    return (
        *("-fno-gnu-unique", "-fno-tree-loop-distribute-patterns"),
        *("-fno-var-tracking", "-fno-var-tracking-assignments"),
        "--param=ggc-min-heapsize=500000",
        *(_CHECKED_GCC if checked else ()),
    )
