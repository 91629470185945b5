"""The ways to build a kernel, and their build times."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cold_build import sources
from cold_build.sources import Program

ROOT = Path(__file__).resolve().parents[2]
# Runs in a new process that has imported Kiln, like a server; the first build loads NVRTC.
_NVRTC = """
import json, sys, time
from kiln.cache.disk.store import Store
from kiln.jit_kernels.compile.build import build
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.toolchains.template import Unit
from kiln.jit_kernels.registry import find_spec
from kiln.jit_kernels.toolchains import nvrtc
arch, empty, *names = sys.argv[1:]
pairs = [(s, v) for s in map(find_spec, names) for v in s.variants()]
def timed(compile, *arguments):
    wall, spent = time.perf_counter(), time.process_time()
    cubin = compile(*arguments)
    return time.perf_counter() - wall, time.process_time() - spent, len(cubin)
def whole(spec, variant):
    return build(spec, variant, arch, KernelCache(Store(None, mode="off"))).cubin
programs = [timed(whole, s, v) for s, v in pairs]
empty = timed(nvrtc.compile_cubin, "empty", Unit("empty.cu", empty, {}), arch)
print(json.dumps([programs, empty]))
"""
Seconds = tuple[float, float]  # wall, CPU


@dataclass
class Way:
    """One way. ``run`` builds every program; its artefacts are kept only for their size.

    ``run`` returns the seconds of each program, and of an empty kernel if the way builds one.
    """

    name: str
    what: str
    programs: Sequence[Program]
    run: Callable[[Way, int], tuple[list[Seconds], Seconds | None]]
    most_rounds: int = 99
    sizes: list[float] = field(default_factory=list)

    def artefact_bytes(self) -> int:
        """Return the mean size of what was built."""
        return round(sum(self.sizes) / len(self.sizes))


def find_ways(
    folder: Path, arch: str, programs: Sequence[Program], install_tvm_ffi: bool
) -> tuple[list[Way], dict[str, str]]:
    """Return the ways available on this machine, and the reasons why others are not."""
    own = Way("nvrtc", "Kiln: NVRTC in the process, to a cubin", programs, _nvrtc(arch))
    if shutil.which("nvcc") is None:
        return [own], {"nvcc-cubin, nvcc-so, tvm-ffi-so, torch-so": "no nvcc"}
    sources.write_headers(folder / "include", programs)
    nvcc = [
        "nvcc", "-std=c++17", f"-I{folder / 'include'}",
        f"-gencode=arch=compute_{arch[3:]},code={arch}",
    ]  # fmt: skip
    ways = [
        own,
        Way("nvcc-cubin", "nvcc -cubin", programs,
            _commands(folder, sources.template, lambda s, o: [[*nvcc, "-cubin", s, "-o", o]],
                      empty=True)),
        Way("nvcc-so", "nvcc -shared, plain C launcher", programs,
            _commands(folder, sources.plain_c, lambda s, o: [
                [*nvcc, "-shared", "-Xcompiler", "-fPIC", s, "-o", o]], empty=True)),
    ]  # fmt: skip
    absent = {}
    for find in (_tvm_ffi, _torch):
        name, found = find(folder, programs, nvcc, install_tvm_ffi)
        if isinstance(found, Way):
            ways.append(found)
        else:
            absent[name] = found
    return ways, absent


def _tvm_ffi(
    folder: Path, programs: Sequence[Program], nvcc: list[str], install: bool
) -> tuple[str, Way | str]:
    name, python = "tvm-ffi-so", sys.executable
    if install:
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv/bin/python")
        subprocess.run([python, "-m", "pip", "install", "-q", "apache-tvm-ffi"], check=True)
    code = (
        "import json, tvm_ffi, tvm_ffi.libinfo as l; print(json.dumps([tvm_ffi.__version__, "
        "l.find_include_path(), l.find_dlpack_include_path(), l.find_libtvm_ffi()]))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return name, "apache-tvm-ffi is not installed; see --install-tvm-ffi"
    version, include, dlpack, library = json.loads(done.stdout)
    flags = [f"-I{include}", f"-I{dlpack}"]

    def commands(source: str, out: str) -> list[list[str]]:
        return [
            [*nvcc, *flags, "-Xcompiler", "-fPIC", "-c", source, "-o", f"{out}.o"],
            ["g++", "-shared", f"{out}.o", library, *_cudart(), "-o", out],
        ]

    what = f"nvcc and link, apache-tvm-ffi {version} launcher"
    build = _commands(folder, sources.tvm_ffi, commands)
    return name, Way(name, what, programs, build, most_rounds=2)


def _torch(
    folder: Path, programs: Sequence[Program], nvcc: list[str], install: bool
) -> tuple[str, Way | str]:
    """Build as load_inline does: a unit for nvcc, a unit for the C++ compiler, and a link.

    Builds only one program: a build takes a minute, almost none of it for the kernel.
    """
    import sysconfig

    import torch

    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    flags = ["-std=c++20", "-w", "-DTORCH_EXTENSION_NAME=x", *(f"-I{one}" for one in folders)]
    nvcc = [flag for flag in nvcc if not flag.startswith("-std=")]
    cuda = Path(shutil.which("nvcc") or "nvcc").resolve().parents[1]
    library = Path(torch.__file__).parent / "lib"

    def commands(source: str, out: str) -> list[list[str]]:
        binding = Path(source).with_suffix(".cpp")
        binding.write_text(sources.torch_binding(programs[0]))
        return [
            [*nvcc, *flags, "-Xcompiler", "-fPIC", "-c", source, "-o", f"{out}.cu.o"],
            ["g++", *flags, f"-I{cuda / 'include'}", "-fPIC", "-c", str(binding), "-o", f"{out}.o"],
            ["g++", "-shared", f"{out}.cu.o", f"{out}.o", f"-L{library}", "-ltorch", "-ltorch_cpu",
             "-lc10", "-ltorch_python", *_cudart(), "-o", out],
        ]  # fmt: skip

    what = f"nvcc, g++ and link, torch {torch.__version__} extension ({programs[0].label} alone)"
    build = _commands(folder, sources.torch_extension, commands)
    return "torch-so", Way("torch-so", what, programs[:1], build, most_rounds=2)


def _cudart() -> list[str]:
    """Return the linker options for nvcc's own runtime library."""
    nvcc = Path(shutil.which("nvcc") or "nvcc").resolve()
    dry = subprocess.run(
        [str(nvcc), "-dryrun", "-shared", "x.o", "-o", "x.so"], capture_output=True, text=True
    )
    words = (word.strip('"') for word in dry.stderr.split())
    folders = dict.fromkeys(word for word in words if word.startswith("-L"))
    return [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def _nvrtc(arch: str) -> Callable[[Way, int], tuple[list[Seconds], Seconds | None]]:
    def run(way: Way, number: int) -> tuple[list[Seconds], Seconds | None]:
        names = dict.fromkeys(one.spec.name for one in way.programs)
        out = subprocess.check_output(
            [sys.executable, "-c", _NVRTC, arch, sources.EMPTY, *names],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tools/import_root")},
        )
        programs, empty = json.loads(out)
        way.sizes += [size for _, _, size in programs]
        return [(wall, spent) for wall, spent, _ in programs], (empty[0], empty[1])

    return run


def _commands(
    folder: Path,
    source_of: Callable[[Program], str],
    commands: Callable[[str, str], list[list[str]]],
    *,
    empty: bool = False,
) -> Callable[[Way, int], tuple[list[Seconds], Seconds | None]]:
    source, out = folder / "x.cu", folder / "x.out"

    def timed(text: str) -> Seconds:
        source.write_text(text)
        before, start = _children(), time.perf_counter()
        for command in commands(str(source), str(out)):
            subprocess.run(command, check=True, cwd=folder)
        return time.perf_counter() - start, _children() - before

    def run(way: Way, number: int) -> tuple[list[Seconds], Seconds | None]:
        seconds = []
        for one in way.programs:
            seconds.append(timed(source_of(one)))
            way.sizes.append(out.stat().st_size)
        return seconds, timed(sources.EMPTY) if empty else None

    return run


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
