"""Compile C++ text to a shared library with a content-addressed key."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from kiln.cache.keys import content_key, digest_of
from kiln.jit_kernels.declare.errors import CompileError, ToolchainMissing

_OUTPUT = "library.so"
_SECONDS = 300  # time limit of a compile
_PROGRAMS = ("cc1plus", "as", "collect2", "ld")  # programs that g++ starts
_SYSTEM_INCLUDE = re.compile(r"^\s*#\s*include\s*(<[^>]+>)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A host compiler: its path, and two texts that identify its version."""

    path: str
    version: str  # output of --version
    programs: str = ""  # size and mtime of its program files, and the C library's version

    @property
    def is_clang(self) -> bool:
        """Whether this is clang, which does not support some of g++'s options."""
        return "clang" in self.version


@dataclass(frozen=True, slots=True)
class Recipe:
    """A library to build: ``main`` is compiled and may include ``files`` by name."""

    name: str  # shown in messages
    main: str
    files: Mapping[str, str]  # path in the build folder -> text
    include_folders: tuple[str, ...]
    flags: tuple[str, ...]

    def key(self, compiler: Compiler) -> str:
        """Return the content-addressed key: a hash of all inputs, including system headers.

        Raises ToolchainMissing.
        """
        texts = (self.main, *self.files.values())
        system = sorted({name for text in texts for name in _SYSTEM_INCLUDE.findall(text)})
        fields = [
            ("kind", b"host library"),
            ("compiler", compiler.path.encode()),
            ("version", compiler.version.encode()),
            ("programs", compiler.programs.encode()),
            ("system-headers", _system_headers(compiler, tuple(system))),
            *(("flag", flag.encode()) for flag in self.flags),
            *(("include", folder.encode()) for folder in self.include_folders),
            ("main", digest_of(self.main.encode())),
        ]
        for name, text in sorted(self.files.items()):
            fields += [("file", name.encode()), ("file-text", digest_of(text.encode()))]
        return content_key(fields)


@cache
def find_compiler(name: str) -> Compiler:
    """Return the host compiler of this name. Raises ToolchainMissing."""
    path = shutil.which(name)
    if path is None:
        raise ToolchainMissing(
            f"the host toolchain needs {name!r}, which is not on PATH: apt-get install g++ (or "
            "clang), or name another compiler in KILN_HOST_COMPILER"
        )
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainMissing(f"{path} --version fails ({error}): reinstall it") from None
    return Compiler(path, answer.stdout, _programs(path))


def _programs(compiler: str) -> str:
    """Return a line for each program that a build runs; a package update may replace one."""
    asked = (_output([compiler, f"-print-prog-name={name}"]) for name in _PROGRAMS)
    lines = [" ".join(platform.libc_ver())]
    for name in (compiler, *(answer.decode().strip() for answer in asked)):
        path = shutil.which(name)
        if path is not None:
            info = os.stat(path)
            lines.append(f"{os.path.realpath(path)} {info.st_size} {info.st_mtime_ns}")
    return "\n".join(lines)


@cache
def _system_headers(compiler: Compiler, names: tuple[str, ...]) -> bytes:
    """Return the digest of system headers and their includes. Raises ToolchainMissing."""
    if not names:
        return b""
    text = "".join(f"#include {name}\n" for name in names)
    return digest_of(_output([compiler.path, "-std=c++20", "-E", "-xc++", "-"], text.encode()))


def _output(command: list[str], text: bytes = b"") -> bytes:
    # An error here will also fail the build, which then shows the compiler's log.
    try:
        done = subprocess.run(command, input=text, capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainMissing(f"{command[0]} does not run ({error}): reinstall it") from None
    return done.stdout


def compile_library(recipe: Recipe, compiler: Compiler) -> bytes:
    """Return the bytes of the library. Raises CompileError with the compiler's log.

    The build folder holds exactly the recipe's files. So nothing else can be included by accident,
    and the library contains no path of this machine.
    """
    with tempfile.TemporaryDirectory(prefix="kiln-host-") as text:
        folder = Path(text)
        for name, content in {**recipe.files, "main.cpp": recipe.main}.items():
            path = folder / PurePosixPath(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        command = [
            compiler.path,
            *recipe.flags,
            *(f"-I{include}" for include in recipe.include_folders),
            f"-ffile-prefix-map={folder}=.",
            *("main.cpp", "-o", _OUTPUT, "-lm", "-lc"),
        ]
        try:
            result = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise CompileError(f"{recipe.name}: {compiler.path} did not run: {error}") from None
        if result.returncode:
            version = compiler.version.partition("\n")[0]
            raise CompileError(f"{recipe.name} does not compile with {version}:\n{result.stderr}")
        return (folder / _OUTPUT).read_bytes()
