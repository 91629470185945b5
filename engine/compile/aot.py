"""Pieces compiled by AOTInductor: packages that load without Dynamo, Inductor or a compiler.

Under some builds of torch a process dies when it loads a package on a GPU. So a new package is
first loaded and run by another process, and refused if that fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from kiln.engine.compile.inductor import compiling
from kiln.engine.compile.program import NUM_TOKENS, Piece, Piecewise, dumps
from kiln.engine.compile.rebuild import TOKENS, empty, graph_of
from kiln.engine.errors import PieceError

_PACKAGE = "piece.pt2"
_SECONDS = 300  # time limit of the other process
# The child imports what this process imports, this copy of Kiln included.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from kiln.engine.compile.prove import main; sys.exit(main(sys.argv[1:]))"
)


def build(piece: Piece, device: torch.device) -> bytes:
    """Compile a piece for any number of tokens. Raises PieceError."""
    with tempfile.TemporaryDirectory(prefix="kiln-aot-") as folder:
        path = Path(folder, _PACKAGE)
        try:
            _compile(piece, path)
        except Exception as error:
            raise PieceError(f"AOTInductor cannot compile a piece of the model: {error}") from error
        _prove(piece, path, device)
        return path.read_bytes()


def load(artefact: bytes, device: torch.device) -> Piecewise:
    """Return the function of a piece that ``build`` made; no compiler runs. Raises PieceError."""
    with tempfile.TemporaryDirectory(prefix="kiln-aot-") as folder:
        path = Path(folder, _PACKAGE)
        path.write_bytes(artefact)
        return load_package(path, device)


def load_package(path: Path, device: torch.device) -> Piecewise:
    """Return the function in a package. Raises PieceError."""
    index = device.index if device.type == "cuda" and device.index is not None else -1
    try:
        # One thread calls it, so a CUDA graph can be captured of it: it asks for no other stream.
        loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
    except RuntimeError as error:
        raise PieceError(f"AOTInductor cannot load a compiled piece: {error}") from error

    def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = loader.run(list(inputs))
        return outputs

    return run


def _compile(piece: Piece, path: Path) -> None:
    import torch._inductor
    from torch._subclasses import FakeTensorMode

    tokens = torch.export.Dim.DYNAMIC
    with compiling(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch about itself
        with FakeTensorMode():  # weights take no memory
            inputs = tuple(empty(one, TOKENS) for one in piece.inputs)
            sizes = [
                {place: tokens for place, size in enumerate(one.shape) if size == NUM_TOKENS}
                for one in piece.inputs
            ]
            exported = torch.export.export(
                graph_of(piece), inputs, dynamic_shapes=sizes, strict=False
            )
        torch._inductor.aoti_compile_and_package(exported, package_path=str(path))


def _prove(piece: Piece, path: Path, device: torch.device) -> None:
    """Run the package in another process. Raises PieceError if it differs, or if that dies."""
    text = path.with_suffix(".json")
    text.write_bytes(dumps(piece))
    paths = json.dumps(sys.path)
    command = [sys.executable, "-P", "-c", _BOOT, paths, str(text), str(path), str(device)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
        died = "" if done.returncode == 0 else f"exit code {done.returncode}"
        told = done.stderr.strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        died, told = f"no end within {_SECONDS} s", ""
    if died:
        raise PieceError(
            f"AOTInductor's package does not run with torch {torch.__version__} on {device} "
            f"({died}{': ' * bool(told)}{told}): use KILN_COMPILE=inductor or off"
        )
