"""Compile translation units to cubins through NVRTC, for any target. Needs no GPU.

Builds are hermetic, so that the key covers every input: all headers are passed in memory, no folder
is searched, and no option is taken from the environment.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from kiln.jit_kernels.declare.errors import CompileError, ToolchainMissing
from kiln.jit_kernels.toolchains.elf import build_id
from kiln.jit_kernels.toolchains.template import Unit

INSTALL_HINT = "pip install cuda-bindings nvidia-cuda-nvrtc (Kiln's extra [cuda] has both)"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_WHEEL_FOLDERS = ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib")

log = logging.getLogger(__name__)


def options(arch: str) -> list[str]:
    """Return the exact ordered options of a build for ``arch``."""
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--minimal",  # omits texture and surface built-ins: 6 % less time, the same cubins
        "--no-source-include",  # do not search the current folder
        "--modify-stack-limit=false",  # else NVRTC raises RLIMIT_STACK of the whole process
        "--device-as-default-execution-space",  # NVRTC 13.0 treats a generic lambda as host code
    ]


@cache
def identity() -> str:
    """Return the identity of the installed NVRTC: the build ids of its libraries.

    The libraries are not loaded. Raises ToolchainMissing if NVRTC is not installed.
    """
    return _identity_of(_library())


@cache
def loaded_identity() -> str:
    """Return the identity of the NVRTC that is loaded in this process.

    If several are installed, the bindings may load another one than ``identity`` found. Its cubins
    are then not published to the cache. Raises ToolchainMissing.
    """
    _bindings()
    maps = Path("/proc/self/maps").read_text()
    loaded = [Path(one) for one in set(re.findall(r"/.*/libnvrtc\.so[.\d]*$", maps, re.MULTILINE))]
    found = _identity_of(loaded[0]) if len(loaded) == 1 else f"nvrtc/one of {len(loaded)} loaded"
    if found != identity():
        log.warning(
            "the NVRTC in %s is not the one found on the path: its kernels are not cached on disk",
            ", ".join(map(str, loaded)) or "memory",
        )
    return found


def _identity_of(library: Path) -> str:
    builtins = sorted(library.parent.glob("libnvrtc-builtins.so*"))
    ids = [build_id(path) or path.name for path in (library, *builtins)]
    return "nvrtc/" + "/".join(ids)


@cache
def version() -> str:
    """Return the version of NVRTC, such as "13.5". Raises ToolchainMissing."""
    nvrtc = _bindings()
    _, major, minor = nvrtc.nvrtcVersion()
    return f"{major}.{minor}"


@cache
def known_capabilities() -> tuple[int, ...]:
    """Return the compute capabilities that NVRTC compiles for, such as 90. Raises ToolchainMissing.

    Other targets make it report hundreds of errors in its own headers.
    """
    _, found = _bindings().nvrtcGetSupportedArchs()
    return tuple(found)


def compile_cubin(label: str, unit: Unit, arch: str) -> bytes:
    """Return the cubin of a translation unit for ``arch`` (such as ``sm_90a``).

    The GIL is released while NVRTC compiles. Raises ToolchainMissing, and CompileError with NVRTC's
    log, which has the template's line numbers.
    """
    return _compile(label, unit, arch, "CUBIN")


def compile_ptx(label: str, unit: Unit, arch: str) -> str:
    """Return the PTX of a translation unit, for tests of instructions."""
    return _compile(label, unit, arch, "PTX").rstrip(b"\0").decode()


def _compile(label: str, unit: Unit, arch: str, kind: str) -> bytes:
    nvrtc = _bindings()
    names = [name.encode() for name in unit.headers]
    texts = [text.encode() for text in unit.headers.values()]
    _, program = nvrtc.nvrtcCreateProgram(
        unit.text.encode(), unit.name.encode(), len(names), texts, names
    )
    try:
        argv = [option.encode() for option in options(arch)]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(argv), argv)
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = _fetch(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0 \n")
            reason = log or nvrtc.nvrtcGetErrorString(error)[1].decode()
            raise CompileError(
                f"kernel {label} did not compile for {arch} with NVRTC {version()}:\n{reason}"
            )
        return _fetch(nvrtc, program, kind)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _fetch(nvrtc: ModuleType, program: Any, what: str) -> bytes:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    # NVRTC writes into the buffer. A bytes object must not change: the interpreter shares those of
    # length 1.
    buffer = bytearray(size)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return bytes(buffer)


def _keep_freed_memory() -> None:
    """Let malloc keep the memory that one compile frees for the next compile.

    Otherwise page faults for 8 MB take a tenth of each compile. glibc sets the same thresholds by
    itself in a process that has freed a large block.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, 32 << 20)
    mallopt(_M_TRIM_THRESHOLD, 64 << 20)


@cache
def _bindings() -> ModuleType:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
        _keep_freed_memory()
    except (ImportError, RuntimeError) as error:  # no bindings, or no library for them
        raise ToolchainMissing(f"NVRTC cannot be loaded ({error}); {INSTALL_HINT}") from None
    return nvrtc  # type: ignore[no-any-return]


def _library() -> Path:
    """Find libnvrtc as the bindings do: in a wheel on the path, else by cuda.pathfinder."""
    for folder in sys.path:
        for pattern in _WHEEL_FOLDERS:
            found = sorted(Path(folder or ".").glob(f"{pattern}/libnvrtc.so*"))
            if found:
                return found[-1]
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return Path(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except (ImportError, RuntimeError) as error:
        raise ToolchainMissing(f"NVRTC is not installed ({error}); {INSTALL_HINT}") from None


def bindings_version() -> str:
    """Return the version of cuda-bindings, or "" when it is not installed."""
    try:
        return importlib.metadata.version("cuda-bindings")
    except importlib.metadata.PackageNotFoundError:
        return ""
