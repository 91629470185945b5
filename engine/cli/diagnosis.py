"""The checks of ``kiln doctor``. Each is a function that returns one finding."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from kiln.cache.disk.root import cache_root
from kiln.engine.cli.disk import file_system, is_network, lock_support, nearest_folder
from kiln.engine.cli.memory_plan import MemoryPlan, plan_memory
from kiln.engine.cli.targets import compiled_archs
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.declare.errors import KernelError
from kiln.jit_kernels.declare.families import families
from kiln.jit_kernels.declare.settings import settings
from kiln.jit_kernels.toolchains import nvrtc
from kiln.jit_kernels.toolchains.host_build import find_compiler

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: "missing" has the cost that ``meaning`` states, "broken" prevents serving."""

    state: State
    name: str
    found: str
    meaning: str = ""


def examine(model: Path, plan: Callable[[Path], MemoryPlan] = plan_memory) -> list[Finding]:
    """Run every check of this machine; ``plan`` makes the memory plan of the folder ``model``."""
    looks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        _driver,
        _gpu,
        _nvrtc,
        _triton,
        _host_compiler,
        _targets,
        _kernel_cache,
        _file_system,
        _locks,
        _machine,
        partial(_memory_plan, model, plan),
    ]
    return [look() for look in looks]


def _driver() -> Finding:
    """Read the driver's version from its kernel module, without loading a library."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return Finding("missing", "NVIDIA driver", "none", "models run on the CPU")
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return Finding("ok", "NVIDIA driver", found[0] if found else text.split("\n")[0][:60])


def _memory_plan(model: Path, make: Callable[[Path], MemoryPlan]) -> Finding:
    name = f"Memory plan of {model.name}"
    try:
        plan = make(model)
    except ConfigError as error:
        return Finding("missing", name, "none", str(error))
    if plan.fits:
        return Finding("ok", name, plan.sentence())
    meaning = f"kiln serve --max-model-len {max(plan.pool_tokens, 2)}, or more memory for the pool"
    return Finding("missing", name, plan.sentence(), meaning)


def _python() -> Finding:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("broken", "Python", found, "Kiln serves on Linux")
    return Finding("ok", "Python", found)


def _torch() -> Finding:
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    return Finding("ok", "torch", f"{torch.__version__}, {built}")


def _gpu() -> Finding:
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        shown = ", ".join(
            f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor})"
            for gpu in gpus
        )
        return Finding("ok", "GPU", shown)
    if Path("/dev/nvidiactl").exists() and torch.version.cuda is None:
        return Finding(
            "missing",
            "GPU",
            "an NVIDIA driver, but torch is built for the CPU",
            "install CUDA torch",
        )
    return Finding("missing", "GPU", "none that torch can use", "models run on the CPU")


def _nvrtc() -> Finding:
    try:
        return Finding("ok", "NVRTC", nvrtc.version())
    except KernelError:
        meaning = f"Triton or torch kernels on a GPU; {nvrtc.INSTALL_HINT}"
        return Finding("missing", "NVRTC", "none", meaning)


def _triton() -> Finding:
    try:
        return Finding("ok", "Triton", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("missing", "Triton", "none", "KILN_<FAMILY>=triton is refused")


def _host_compiler() -> Finding:
    name = settings().host_compiler
    try:
        find_compiler(name)
    except KernelError:
        meaning = "no kernels on the CPU: KILN_CPU_KERNELS=host, kiln kernels check"
        return Finding("missing", "C++ compiler", f"no {name}", meaning)
    return Finding("ok", "C++ compiler", shutil.which(name) or name)


def _targets() -> Finding:
    """Return the targets that kernels are compiled for."""
    try:
        archs = compiled_archs(None)
    except KernelError as error:
        return Finding("broken", "Targets", settings().kernel_arch or "", str(error))
    forced = "KILN_KERNEL_ARCH" if settings().kernel_arch else ""
    return Finding("ok", "Targets", ", ".join(archs), forced)


def _kernel_cache() -> Finding:
    """Check the nearest existing folder: the cache itself is created when needed."""
    root = cache_root(settings())
    if root is None:
        return Finding("missing", "Kernel cache", "no home folder", "every start compiles again")
    existing = nearest_folder(root)
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        meaning = f"every start compiles again: {existing} is not a writable folder"
        return Finding("missing", "Kernel cache", str(root), meaning)
    entries = sum(1 for path in root.rglob("*") if path.is_file()) if root.is_dir() else 0
    return Finding("ok", "Kernel cache", f"{root} ({entries} files, {len(families())} families)")


def _file_system() -> Finding:
    root = cache_root(settings())
    kind = file_system(nearest_folder(root)) if root is not None else ""
    meaning = "kernels are shared with other machines" if is_network(kind) else ""
    return Finding("ok", "File system", kind or "unknown", meaning)


def _locks() -> Finding:
    held, where = lock_support(settings())
    if held:
        return Finding("ok", "Builder lock", where)
    return Finding("missing", "Builder lock", where, "processes build the same kernel twice")


def _machine() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Finding("ok", "Machine", f"{cores} cores, {memory:.0f} GiB of memory")
