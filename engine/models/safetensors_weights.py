"""Weights from one or several safetensors files: memory-mapped, or read by threads for a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import ExitStack, closing
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kiln.engine.errors import ModelError
from kiln.engine.models.file_extents import extents_of
from kiln.engine.models.hub import INDEX, SINGLE
from kiln.engine.models.model_folder import read_json
from kiln.engine.models.refused_formats import gguf_advice
from kiln.engine.models.staged_copies import Copier, CudaCopier, StagedCopies
from kiln.engine.models.tensor_file import TensorFile
from kiln.engine.models.weights import Index, Weights, check_part

_DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
_UNUSED = (".rotary_emb.inv_freq",)  # buffers in old checkpoints; Kiln computes its own table


class SafetensorsWeights(Weights):
    """The tensors of a model folder.

    Tensors for a GPU are read by threads; ``copier`` does the same for any device. Raises
    ModelError, here or in ``fill``, if a file is missing, half-downloaded or corrupt.
    """

    def __init__(self, folder: Path, copier: Copier | None = None) -> None:
        self._open_files = ExitStack()
        self._files: dict[Path, Any] = {}
        self._sizes: dict[Path, int] = {}
        self._homes = self._find(folder)
        self._used: set[str] = set()
        self._copier = copier
        self._staged: StagedCopies | None = None
        self._unmapped: dict[Path, TensorFile] = {}
        self._bytes_read = 0

    @property
    def names(self) -> Set[str]:
        """The names of all tensors."""
        return self._homes.keys()

    @property
    def progress(self) -> tuple[int, int]:
        """The bytes that were read so far, and those of all files."""
        return self._bytes_read, sum(self._sizes.values())

    def has(self, name: str) -> bool:
        """Whether the files have a tensor."""
        return name in self._homes

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in its file. Raises ModelError."""
        path, part = self._find_tensor(name)
        if part.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{path}: tensor {name} is {part.get_dtype()}, want one of {', '.join(_DTYPES)}"
            )
        return _DTYPES[part.get_dtype()]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor in its file. Raises ModelError."""
        return tuple(self._find_tensor(name)[1].get_shape())

    def fill(self, name: str, out: torch.Tensor, shape: Sequence[int], index: Index = ()) -> None:
        """Copy a tensor, or only the part at ``index``, from its file."""
        check_part(name, out, shape, index)
        path, part = self._find_tensor(name)
        if list(part.get_shape()) != list(shape):
            raise ModelError(
                f"{path}: tensor {name} is {part.get_dtype()} {list(part.get_shape())}, "
                f"config.json implies {list(shape)}"
            )
        stored = self.dtype(name)
        try:
            self._check_size(path)  # to touch a map of what is no longer there ends the process
            if out.is_meta:  # nothing to fill: the name and the shape are right
                self._used.add(name)
                return
            if self._copier is not None or out.is_cuda:
                self._read(path, name, out, stored, shape, index)
            else:
                out.copy_(part[index or ...])
        except (SafetensorError, OSError, ValueError) as error:
            raise _unreadable(path, name, error) from error
        self._used.add(name)
        self._bytes_read += out.numel() * stored.itemsize

    def _check_size(self, path: Path) -> None:
        """Raise OSError if a file has shrunk, or is gone."""
        size, found = self._sizes[path], path.stat().st_size
        if found < size:
            raise OSError(f"the file had {size} bytes and has {found} now: download it again")

    def _read(
        self,
        path: Path,
        name: str,
        out: torch.Tensor,
        stored: torch.dtype,
        shape: Sequence[int],
        index: Index,
    ) -> None:
        """Copy by threads. Raises OSError, ValueError."""
        if self._staged is None:
            self._staged = StagedCopies(self._copier or CudaCopier())
            self._open_files.callback(self._staged.close)
        if path not in self._unmapped:
            self._unmapped[path] = self._open_files.enter_context(closing(TensorFile(path)))
        file = self._unmapped[path]
        begin, end = file.place(name, math.prod(shape) * stored.itemsize)
        places = extents_of(begin, stored.itemsize, shape, index)
        self._staged.copy(out, stored, file.number, places)
        if not index:  # other ranks read the rest of what they share
            self._staged.read_ahead(file.number, end)

    def ignore(self, name: str) -> None:
        """Do not report a tensor as left over although the model does not use it."""
        self._used.add(name)

    def finish(self) -> None:
        """Close the files. Raises ModelError if tensors are left over: config.json is wrong."""
        self._open_files.close()
        left = sorted(n for n in set(self._homes) - self._used if not n.endswith(_UNUSED))
        if left:
            raise ModelError(
                f"{self._where()}: the architecture of config.json does not use {len(left)} "
                f"tensors, such as {', '.join(left[:3])}"
            )

    def _find_tensor(self, name: str) -> tuple[Path, Any]:
        """Return a tensor's file, and safetensors' lazy slice of it."""
        path = self._homes.get(name)
        if path is None:
            raise ModelError(f"{self._where()}: tensor {name} is missing: is the model complete?")
        try:
            return path, self._files[path].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise _unreadable(path, name, error) from error

    def _where(self) -> str:
        return str(next(iter(self._files)).parent)

    def _find(self, folder: Path) -> dict[str, Path]:
        """Open every file and return the path of each tensor's file."""
        index = folder / INDEX
        if not index.exists():
            path = folder / SINGLE
            return dict.fromkeys(self._open(path), path)
        homes = _read_index(index)
        single = folder / SINGLE
        if single.exists() and single not in homes.values():
            raise ModelError(
                f"{folder}: {SINGLE} and {INDEX}, which lists other files, are both here: "
                "remove the one that is not the model"
            )
        held = {path: self._open(path) for path in sorted(set(homes.values()))}
        for name, path in homes.items():
            if name not in held[path]:
                raise ModelError(f"{path}: tensor {name} is missing, but {INDEX} lists it here")
        return homes

    def _open(self, path: Path) -> frozenset[str]:
        self._files[path] = self._open_files.enter_context(_opened(path))
        self._sizes[path] = path.stat().st_size
        return frozenset(self._files[path].keys())


def file_problems(folder: Path) -> list[str]:
    """Return what is wrong with each file of a folder's weights. Raises ModelError for the index.

    Empty if each of them can be opened.
    """
    index = folder / INDEX
    paths = sorted(set(_read_index(index).values())) if index.exists() else [folder / SINGLE]
    problems = []
    for path in paths:
        try:
            with _opened(path):
                pass
        except ModelError as error:
            problems.append(str(error))
    return problems


def stored_dtype(folder: Path) -> str:
    """Return the name of the dtype that holds every float of the weights; float32 without any.

    Float8 and narrower types are left out. Raises ModelError.
    """
    if not any((folder / name).exists() for name in (INDEX, SINGLE)):
        return "float32"
    weights = SafetensorsWeights(folder)
    found = {weights.dtype(name) for name in weights.names}
    floats = [dtype for dtype in found if dtype.is_floating_point and dtype.itemsize > 1]
    dtype = reduce(torch.promote_types, floats) if floats else torch.float32
    return str(torch.float32 if dtype == torch.float64 else dtype).removeprefix("torch.")


def _opened(path: Path) -> Any:
    """Return an open file. Raises ModelError if it is missing or incomplete."""
    if not path.is_file():
        raise ModelError(_missing(path))
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:  # of torch, which maps it
        raise ModelError(f"{path}: cannot be mapped ({error})") from error
    except (SafetensorError, OSError) as error:
        raise ModelError(
            f"{path}: not a complete safetensors file ({error}): download it again"
        ) from error


def _unreadable(path: Path, name: str, error: Exception) -> ModelError:
    return ModelError(f"{path}: tensor {name} cannot be read ({error})")


def _read_index(index: Path) -> dict[str, Path]:
    """Return the file of each tensor. Raises ModelError."""
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ModelError(f"{index}: weight_map is missing or empty: download it again")
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{index}: tensor {name} is in {file!r}, want a file beside the index")
    return {name: index.parent / file for name, file in placed.items()}


def _missing(path: Path) -> str:
    """Say which file is missing, and which weights exist instead."""
    others = sorted(p.name for p in path.parent.glob("*") if p.suffix in (".safetensors", ".bin"))
    if path.name != SINGLE:
        return f"{path}: this shard is missing: the download is incomplete"
    if not others:
        wanted = f"want {SINGLE} or {INDEX} with its shards"
        return f"{path.parent}: no weights found, {gguf_advice(path.parent) or wanted}"
    return (
        f"{path.parent}: neither {SINGLE} nor {INDEX} found, only {', '.join(others[:3])}: "
        f"download the safetensors files of the model"
    )
