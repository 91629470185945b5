"""The runtime in kernel_sources/host: built and loaded once, called under one lock."""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache
from pathlib import Path

from kiln.jit_kernels.toolchains.host_build import Recipe, compile_library, find_compiler
from kiln.jit_kernels.toolchains.host_folder import library_folder, private_folder
from kiln.jit_kernels.toolchains.template import read_source

HEADERS = ("host/cuda_host.h",)  # headers that kernels include too
_SOURCES = ("fiber", "scheduler", "sync", "matrix", "wgmma", "cluster", "check", "api")
_FLAGS = (
    *("-O2", "-std=c++20", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-fno-exceptions", "-fno-rtti"),
)

log = logging.getLogger(__name__)


class Runtime:
    """The C functions of kernel_sources/host/api.cpp. Its state is global: hold ``lock``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.lock = threading.Lock()
        uint, size, address = ctypes.c_uint, ctypes.c_size_t, ctypes.c_void_p
        self.begin = library.cuda_host_begin
        self.begin.argtypes = (
            *(uint, ctypes.c_uint64, uint, ctypes.c_int, ctypes.c_int, ctypes.c_double),
        )
        self.region = library.cuda_host_region
        self.region.argtypes = (address, size)
        self.enqueue = library.cuda_host_enqueue
        self.enqueue.argtypes = (
            *(uint, address, uint * 3, uint * 3, size, address),
            *(uint, uint, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        )
        self.enqueue.restype = size
        self.run = library.cuda_host_run
        self.run.restype = size
        self.report = library.cuda_host_report
        self.report.restype = ctypes.c_char_p
        self.switches = library.cuda_host_switches
        self.switches.restype = ctypes.c_uint64


def load_library(recipe: Recipe, compiler: str, root: Path | None, mode: int) -> ctypes.CDLL:
    """Load a library, building it if needed. Raises CompileError and ToolchainMissing."""
    found = find_compiler(compiler)
    key, folder = recipe.key(found), library_folder(root)
    if not folder.holds(key):
        library = compile_library(recipe, found)
        try:
            folder.publish(key, library)
        except OSError as error:
            log.warning("kernel cache: not saving %s to disk: %s", recipe.name, error)
            folder = private_folder()
            folder.publish(key, library)
    return folder.load(key, mode)


def runtime(compiler: str, root: Path | None) -> Runtime:
    """Return the process's runtime; the first call builds it if needed.

    There can be only one, because kernels find it through the global symbol table.
    """
    with _first():
        loaded = _loaded()
        if not loaded:
            library = load_library(_recipe(), compiler, root, ctypes.RTLD_GLOBAL)
            loaded.append(Runtime(library))
    return loaded[0]


def _recipe() -> Recipe:
    names = ("host/runtime.h", *HEADERS, *(f"host/{source}.cpp" for source in _SOURCES))
    main = "".join(f'#include "host/{source}.cpp"\n' for source in _SOURCES)
    files = {name: read_source(name) for name in names}
    return Recipe("the host runtime", main, files, (".",), _FLAGS)


@cache
def _first() -> threading.Lock:
    return threading.Lock()


@cache
def _loaded() -> list[Runtime]:
    return []
