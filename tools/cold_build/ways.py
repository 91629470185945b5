"""The ways to build a kernel, and how long each takes."""

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

ROOT = Path(__file__).resolve().parents[2]
# In a process of its own, which has imported Kiln as a server has; NVRTC is loaded by the first.
_NVRTC = """
import json, resource, sys, time
from kiln.cache.store import Store
from kiln.jit_kernels.compile.build import build
from kiln.jit_kernels.compile.kernel_cache import KernelCache
from kiln.jit_kernels.registry import find_spec
arch, *names = sys.argv[1:]
pairs = [(s, next(v for v in s.variants() if v["scalar_t"] == "kiln::bf16"))
         for s in map(find_spec, names)]
wall, spent = time.perf_counter(), time.process_time()
cubins = [build(s, v, arch, KernelCache(Store(None, mode="off"))).cubin for s, v in pairs]
print(json.dumps([time.perf_counter() - wall, time.process_time() - spent,
                  sum(map(len, cubins)) / len(cubins)]))
"""


@dataclass
class Way:
    """One way: ``run`` builds every kernel anew; artefacts are kept for their size alone."""

    name: str
    what: str
    kernels: Sequence[str]
    run: Callable[[Way, int], tuple[float, float]]
    most_rounds: int = 99
    sizes: list[float] = field(default_factory=list)

    def build_all(self, round_number: int) -> tuple[float, float]:
        """Return wall and CPU seconds of a kernel, the mean over all of them."""
        wall, spent = self.run(self, round_number)
        return wall / len(self.kernels), spent / len(self.kernels)

    def artefact_bytes(self) -> int:
        """Return the mean size of what was built."""
        return round(sum(self.sizes) / len(self.sizes))


def find_ways(
    folder: Path, arch: str, kernels: Sequence[str], install_tvm_ffi: bool
) -> tuple[list[Way], dict[str, str]]:
    """Return the ways that this machine has, and why not the others."""
    own = Way("nvrtc", "Kiln: NVRTC in the process, to a cubin", kernels, _nvrtc(arch))
    if shutil.which("nvcc") is None:
        return [own], {"nvcc-cubin, nvcc-so, tvm-ffi-so, torch-so": "no nvcc"}
    sources.write_headers(folder / "include", list(kernels))
    nvcc = [
        "nvcc", "-std=c++17", f"-I{folder / 'include'}",
        f"-gencode=arch=compute_{arch[3:]},code={arch}",
    ]  # fmt: skip
    ways = [
        own,
        Way("nvcc-cubin", "nvcc -cubin", kernels,
            _commands(folder, sources.template, lambda s, o: [[*nvcc, "-cubin", s, "-o", o]])),
        Way("nvcc-so", "nvcc -shared, plain C launcher", kernels,
            _commands(folder, sources.plain_c, lambda s, o: [
                [*nvcc, "-shared", "-Xcompiler", "-fPIC", s, "-o", o]])),
    ]  # fmt: skip
    absent = {}
    for find in (_tvm_ffi, _torch):
        name, found = find(folder, kernels, nvcc, install_tvm_ffi)
        if isinstance(found, Way):
            ways.append(found)
        else:
            absent[name] = found
    return ways, absent


def _tvm_ffi(
    folder: Path, kernels: Sequence[str], nvcc: list[str], install: bool
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
    return name, Way(name, what, kernels, _commands(folder, sources.tvm_ffi, commands))


def _torch(
    folder: Path, kernels: Sequence[str], nvcc: list[str], install: bool
) -> tuple[str, Way | str]:
    """As load_inline does: a unit for nvcc, a unit for the C++ compiler, and a link.

    Only one kernel: a build takes a minute, all but nothing of it for the kernel.
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
        binding.write_text(sources.torch_binding(kernels[0]))
        return [
            [*nvcc, *flags, "-Xcompiler", "-fPIC", "-c", source, "-o", f"{out}.cu.o"],
            ["g++", *flags, f"-I{cuda / 'include'}", "-fPIC", "-c", str(binding), "-o", f"{out}.o"],
            ["g++", "-shared", f"{out}.cu.o", f"{out}.o", f"-L{library}", "-ltorch", "-ltorch_cpu",
             "-lc10", "-ltorch_python", *_cudart(), "-o", out],
        ]  # fmt: skip

    what = f"nvcc, g++ and link, torch {torch.__version__} extension ({kernels[0]} alone)"
    build = _commands(folder, sources.torch_extension, commands)
    return "torch-so", Way("torch-so", what, kernels[:1], build, most_rounds=2)


def _cudart() -> list[str]:
    """Return where nvcc's own runtime library is, as it would link it."""
    nvcc = Path(shutil.which("nvcc") or "nvcc").resolve()
    dry = subprocess.run(
        [str(nvcc), "-dryrun", "-shared", "x.o", "-o", "x.so"], capture_output=True, text=True
    )
    words = (word.strip('"') for word in dry.stderr.split())
    folders = dict.fromkeys(word for word in words if word.startswith("-L"))
    return [*folders, "-lcudart_static", "-ldl", "-lrt", "-lpthread"]


def _nvrtc(arch: str) -> Callable[[Way, int], tuple[float, float]]:
    def run(way: Way, number: int) -> tuple[float, float]:
        out = subprocess.check_output(
            [sys.executable, "-c", _NVRTC, arch, *way.kernels],
            env={**os.environ, "PYTHONPATH": str(ROOT / "tools/import_root")},
        )
        wall, spent, size = json.loads(out)
        way.sizes.append(size)
        return wall, spent

    return run


def _commands(
    folder: Path,
    source_of: Callable[[str], str],
    commands: Callable[[str, str], list[list[str]]],
) -> Callable[[Way, int], tuple[float, float]]:
    def run(way: Way, number: int) -> tuple[float, float]:
        wall = spent = 0.0
        for kernel in way.kernels:
            place = folder / f"{way.name}-{number}-{kernel}"
            source, out = place.with_suffix(".cu"), place.with_suffix(".out")
            source.write_text(source_of(kernel))
            before, start = _children(), time.perf_counter()
            for command in commands(str(source), str(out)):
                subprocess.run(command, check=True, cwd=folder)
            wall += time.perf_counter() - start
            spent += _children() - before
            way.sizes.append(out.stat().st_size)
        return wall, spent

    return run


def _children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
