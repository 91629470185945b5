"""The inputs of a trace and of a build. Their hash is the key of the result in the cache.

They are exactly what can change the result: no path, no environment, no host name, no model name.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

import kiln.engine
from kiln.cache.keys import digest_of
from kiln.engine.compile.functions import schemas_of
from kiln.engine.compile.parameters import structure_of
from kiln.engine.compile.program import Piece
from kiln.engine.models.family import Model
from kiln.jit_kernels.compile.ingredients import Ingredients
from kiln.jit_kernels.declare.arch import device_arch
from kiln.jit_kernels.registry import all_specs

_TRACED = (
    "attention",
    "compile",
    "layers",
    "lora",
    "models",
)  # folders whose code a trace depends on
_FLAGS = re.compile(r"^(?:flags|Features)\s*: (.*)$", re.MULTILINE)


def program_ingredients(model: Model) -> Ingredients:
    """Return what determines the program of a model. Raises PieceError."""
    schemas = sorted(f"{spec.name}{spec.parameters.schema}" for spec in all_specs().values())
    return (
        ("kind", "program"),
        *_torch_build(),
        ("sources", _sources(*_TRACED)),
        ("schemas", _digest("\n".join(schemas))),
        ("model", _digest("\n".join(structure_of(model)))),
    )


def piece_ingredients(
    piece: Piece, backend: str, options: Mapping[str, object], device: torch.device
) -> Ingredients:
    """Return what determines the artefact of a piece. ``options``: those given to the compiler."""
    return (
        ("kind", f"piece by {backend}"),
        *_torch_build(),
        ("target", target_of(device)),
        ("instructions", "" if device.type == "cuda" else _cpu_instructions()),
        ("options", json.dumps(options, sort_keys=True)),
        ("builder", _sources("compile")),
        *(("schema", schema) for schema in schemas_of([call.target for call in piece.calls])),
        ("structure", piece.digest),
    )


def target_of(device: torch.device) -> str:
    """Return what pieces are compiled for: "cpu", or a GPU's such as "sm_90a"."""
    return device_arch(device) if device.type == "cuda" else "cpu"


def _torch_build() -> Ingredients:
    # Inductor writes its artefacts with pickle, and its GPU code with Triton.
    version = torch.version
    return (
        ("torch", f"{torch.__version__} {version.git_version} cuda {version.cuda}"),
        ("triton", _triton()),
        ("python", f"{sys.implementation.cache_tag} {platform.machine()}"),
    )


@cache
def _triton() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


@cache
def _sources(*folders: str) -> str:
    """Return a digest of the code in some folders of the engine."""
    root = Path(kiln.engine.__file__).parent
    paths = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    texts = (f"{path.relative_to(root).as_posix()} {_digest(path.read_text())}" for path in paths)
    return _digest("\n".join(texts))


@cache
def _cpu_instructions() -> str:
    """Return what a program that g++ compiles for this very CPU may use."""
    found = _FLAGS.search(Path("/proc/cpuinfo").read_text())
    flags = " ".join(sorted(found[1].split())) if found else ""
    return f"{torch.backends.cpu.get_cpu_capability()} {_digest(flags)}"


def _digest(text: str) -> str:
    return digest_of(text.encode()).hex()
