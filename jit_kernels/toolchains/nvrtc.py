"""NVRTC: a translation unit to a cubin, for any target, on any machine. Needs no GPU.

The world is closed: every header is passed in memory, no folder is searched, no option comes from
outside, so that the key of a build can name everything that went into it.
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

from kiln.jit_kernels.errors import CompileError, ToolchainMissing
from kiln.jit_kernels.template import Unit
from kiln.jit_kernels.toolchains.elf import build_id

INSTALL_HINT = "pip install cuda-bindings nvidia-cuda-nvrtc (Kiln's extra [cuda] has both)"
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_WHEEL_FOLDERS = ("nvidia/cu*/lib", "nvidia/cuda_nvrtc/lib")

log = logging.getLogger(__name__)


def options(arch: str) -> list[str]:
    """Return the exact ordered options of a build for ``arch``."""
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--minimal",  # leaves out texture and surface built-ins: 6 % less time, the same cubins
        "--no-source-include",  # never search the current folder
        "--modify-stack-limit=false",  # NVRTC would lift RLIMIT_STACK of the whole process
        "--device-as-default-execution-space",  # NVRTC 13.0 takes a generic lambda for the host's
    ]


@cache
def identity() -> str:
    """Return which NVRTC builds here: the build ids of its libraries, read without loading them.

    Raises ToolchainMissing when NVRTC is not installed.
    """
    return _identity_of(_library())


@cache
def loaded_identity() -> str:
    """Return which NVRTC has compiled here: the identity of the library that is loaded.

    Where several are installed the bindings may take another than ``identity`` found; what it
    builds is then kept out of the cache. Raises ToolchainMissing.
    """
    _bindings()
    maps = Path("/proc/self/maps").read_text()
    loaded = [Path(one) for one in set(re.findall(r"/.*/libnvrtc\.so[.\d]*$", maps, re.MULTILINE))]
    found = _identity_of(loaded[0]) if len(loaded) == 1 else f"nvrtc/one of {len(loaded)} loaded"
    if found != identity():
        log.warning(
            "the NVRTC in %s is not the one found on the path: its kernels are not kept on disk",
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


def compile_cubin(label: str, unit: Unit, arch: str) -> bytes:
    """Return the cubin of a translation unit for ``arch`` (such as ``sm_90a``).

    The GIL is released while NVRTC works. Raises CompileError with NVRTC's log, in the
    template's own lines, and ToolchainMissing.
    """
    return _compile(label, unit, arch, "CUBIN")


def compile_ptx(label: str, unit: Unit, arch: str) -> str:
    """Return the PTX text of a translation unit, for tests that pin instructions."""
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
    # A bytearray: NVRTC writes into the buffer, and a bytes object of length 1 is shared by the
    # whole interpreter.
    buffer = bytearray(size)
    getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    return bytes(buffer)


def _keep_freed_memory() -> None:
    """Let malloc keep what one compile frees for the next.

    Else each asks the system anew for 8 MB, page by page, in a tenth of its time. These are the
    thresholds that glibc comes to by itself in a process that has freed a large block.
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
    except (ImportError, RuntimeError) as error:  # no bindings, or no library behind them
        raise ToolchainMissing(f"NVRTC cannot be loaded ({error}); {INSTALL_HINT}") from None
    return nvrtc  # type: ignore[no-any-return]


def _library() -> Path:
    """Find libnvrtc as the bindings would: in a wheel on the path, else where they look."""
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
