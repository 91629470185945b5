"""Pieces compiled by Inductor, saved with all that loading them would compile again."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from kiln.engine.compile.program import Piece, Piecewise
from kiln.engine.compile.rebuild import rebuild
from kiln.engine.errors import PieceError

_ARTEFACT = "artefact"
# Options of Inductor and AOTInductor. No precompiled headers: their folder may belong to another
# user, and loading a compiled piece would build them again. One thread: with more, Inductor starts
# a pool of processes that goes on running when the engine is ready.
OPTIONS = {
    "cpp_cache_precompile_headers": False,
    "aot_inductor.precompile_headers": False,
    "compile_threads": 1,
}


def build(piece: Piece, device: torch.device) -> bytes:
    """Compile a piece for any number of tokens. Raises PieceError.

    The result holds Inductor's own artefact, and the shared libraries that it loads.
    """
    import torch._inductor

    folder = Path(_folder().name)
    path = folder / f"{_ARTEFACT}-{piece.digest}"
    try:
        module, inputs = rebuild(piece)
        with compiling(), torch.inference_mode():
            made = torch._inductor.standalone_compile(
                module, inputs, dynamic_shapes="from_graph", options={}, aot=True
            )
            made.save(path=str(path), format="binary")
    except Exception as error:
        raise PieceError(f"Inductor cannot compile a piece of the model: {error}") from error
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(path, _ARTEFACT)
        for library in sorted(folder.rglob("*.so")):
            archive.write(library, library.relative_to(folder).as_posix())
    path.unlink()
    return content.getvalue()


def load(artefact: bytes, device: torch.device) -> Piecewise:
    """Return the function of a piece that ``build`` made; no compiler runs. Raises PieceError.

    But where torch is installed in another folder, Inductor compiles its C++ for a CPU again: the
    folder is part of its own keys. On a CPU it also asks g++ for its version.
    """
    from torch._inductor.standalone_compile import CompiledArtifact

    folder = Path(_folder().name)
    try:
        with zipfile.ZipFile(io.BytesIO(artefact)) as archive:
            for name in archive.namelist():
                if name == _ARTEFACT or not (folder / name).exists():
                    archive.extract(name, folder)
        with compiling():
            loaded = CompiledArtifact.load(path=str(folder / _ARTEFACT), format="binary")
    except Exception as error:
        raise PieceError(f"Inductor cannot load a compiled piece: {error}") from error
    (folder / _ARTEFACT).unlink()
    function: Piecewise = loaded
    return function


@contextmanager
def compiling() -> Iterator[None]:
    """Make Inductor use our options, and read and write our folder alone."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    known = config.get_config_copy()
    wanted = {name: value for name, value in OPTIONS.items() if name in known}
    with config.patch(wanted), temporary_cache_dir(_folder().name):
        yield


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return this process's own folder for what Inductor writes.

    Inductor's usual folder can belong to another user, and it trusts what it finds there. Its
    programs may read the folder when they are first called, so it stays until the process ends.
    """
    return tempfile.TemporaryDirectory(prefix="kiln-inductor-")
