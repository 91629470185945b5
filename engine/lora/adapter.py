"""Read a LoRA adapter in PEFT's format, and check all of it against the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kiln.engine.errors import AdapterError, ModelError
from kiln.engine.lora.adapter_config import CONFIG_FILE, AdapterConfig, read_adapter_config
from kiln.engine.lora.base_weights import first_difference
from kiln.engine.lora.sites import Kind, Part, Site, Sites
from kiln.engine.lora.tensor_names import Role, split_name

WEIGHTS_FILE = "adapter_model.safetensors"
_DTYPES = ("F32", "F16", "BF16", "F64")
_PICKLES = (".bin", ".pt", ".pth")
_SHOWN = 3  # names in a message


@dataclass(frozen=True, slots=True)
class LoRAPair:
    """What an adapter adds to one part on all ranks: ``scale * b @ a @ x``.

    a: [rank, inputs], for an embedding [rank, vocab_size]; b: [outputs, rank].
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """The rank of the product."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A checked adapter. ``pairs`` is by row of a part; a part without an entry has rank 0."""

    name: str
    pairs: Mapping[int, LoRAPair]


def read_adapter(
    name: str,
    folder: Path,
    sites: Sites,
    dtype: torch.dtype,
    *,
    max_rank: int | None = None,
) -> Adapter:
    """Read an adapter for a model, with its tensors in ``dtype`` on the CPU.

    A larger rank than ``max_rank`` is refused before its tensors are read. Copies of base weights
    must equal those of ``sites``, of which a rank may have a share.
    Raises AdapterError, which names the adapter and the key or tensor: a file is missing or
    damaged, a key or tensor is not supported, or a tensor does not fit config or model.
    """
    try:
        if not folder.is_dir():
            raise ModelError(f"{folder} is not a folder: give one with {WEIGHTS_FILE}")
        config = read_adapter_config(folder)
        with _opened(folder) as file:
            parts = {part.name: (part, site) for site in sites.all for part in site.parts}
            path, refused = folder / WEIGHTS_FILE, sites.refused
            reader = _Reader(path, file, config, parts, refused, dtype, max_rank)
            return Adapter(name, reader.pairs())
    except (ModelError, OSError) as error:
        raise AdapterError(f"LoRA adapter {name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class _Reader:
    """The checks of one file of tensors. ``parts`` is by name; ``refused``: see Sites."""

    path: Path
    file: Any
    config: AdapterConfig
    parts: Mapping[str, tuple[Part, Site]]
    refused: Mapping[str, str]
    dtype: torch.dtype
    max_rank: int | None

    def pairs(self) -> dict[int, LoRAPair]:
        """Return the pairs of all modules."""
        found: dict[str, dict[Role, str]] = {}
        copies: list[tuple[str, str]] = []  # modules, tensors
        adapters: dict[str, str] = {}  # names of adapters, and a tensor of each
        trained: dict[str, str] = {}  # modules, and what adapter_config.json calls them
        for name in sorted(self.file.keys()):
            read = split_name(name, self.parts, self.refused, self.path)
            if read.is_of_images:  # changes nothing of texts
                continue
            if read.role in (Role.BASE_WEIGHT, Role.WEIGHT):
                copies.append((read.module, name))
                continue
            if (other := trained.setdefault(read.module, read.trained)) != read.trained:
                raise ModelError(
                    f"{self.path}: {other} and {read.trained} are the same layer: remove one"
                )
            found.setdefault(read.module, {})[read.role] = name
            adapters.setdefault(read.adapter, name)
        if len(adapters) > 1:
            raise ModelError(
                f"{self.path}: holds tensors of several adapters, such as "
                f"{' and '.join([*adapters.values()][:2])}: save each in a folder of its own"
            )
        self.config.settle([*trained.values()], str(self.path.with_name(CONFIG_FILE)))
        self._check_modules(trained, [module for module, _ in copies])
        pairs = {}
        for module, names in found.items():
            part, site = self.parts[module]
            pairs[part.row] = self._pair(names, part, site.kind, trained[module])
        if not pairs:
            raise ModelError(f"{self.path}: holds no LoRA tensors")
        for module, name in copies:
            self._check_copy(name, *self.parts[module])
        return pairs

    def _check_modules(self, trained: Mapping[str, str], copied: Iterable[str]) -> None:
        unknown = [module for module in (*trained, *copied) if module not in self.parts]
        if unknown:
            raise ModelError(
                f"{self.path}: the model has no {', '.join(unknown[:_SHOWN])} "
                f"({len(unknown)} such modules): was the adapter trained on this model?"
            )
        strays = [name for name in trained.values() if not self.config.modules.has(name)]
        if strays:
            raise ModelError(
                f"{self.path}: holds tensors of {', '.join(strays[:_SHOWN])} ({len(strays)} such "
                "modules), which target_modules and the keys beside it in adapter_config.json "
                "leave out"
            )

    def _check_copy(self, name: str, part: Part, site: Site) -> None:
        """Check that a copy of a base weight is the model's, which is used."""
        shape = part.whole_size
        self._check(name, shape[::-1] if site.kind is Kind.EMBEDDING else shape, "the model's is")
        row = first_difference(site, part, self.file.get_slice(name))
        if row is not None:
            raise ModelError(
                f"{self.path}: tensor {name} is a copy of {part.name} that differs from the "
                f"model's, first in row {row}: the adapter needs this weight, which trained whole "
                "modules (modules_to_save) or new tokens change, and Kiln uses the model's: serve "
                "a model that was saved with it, or save the adapter without it "
                "(save_embedding_layers=False)"
            )

    def _pair(self, names: Mapping[Role, str], part: Part, kind: Kind, trained: str) -> LoRAPair:
        roles = (Role.EMBEDDING_A, Role.EMBEDDING_B) if kind is Kind.EMBEDDING else (Role.A, Role.B)
        odd = [name for role, name in names.items() if role not in roles]
        if odd:
            raise ModelError(
                f"{self.path}: tensor {odd[0]}: {part.name} needs {' and '.join(map(_end, roles))}"
            )
        for role in roles:
            if role not in names:
                other = next(name for own, name in names.items() if own in roles)
                raise ModelError(
                    f"{self.path}: tensor {other} is there, but {part.name}{role.value} is missing"
                )
        rank = self.config.rank(trained)
        if self.max_rank is not None and rank > self.max_rank:
            raise ModelError(
                f"{self.path}: {part.name} has rank {rank}, above max_lora_rank="
                f"{self.max_rank}: raise it, or use an adapter of lower rank"
            )
        says = f"the model and rank {rank} of adapter_config.json imply"
        a, b = (names[role] for role in roles)
        outputs, inputs = part.whole_size
        return LoRAPair(
            self._tensor(a, (rank, inputs), says),
            self._tensor(b, (outputs, rank), says),
            self.config.scale(trained),
        )

    def _tensor(self, name: str, shape: tuple[int, ...], says: str) -> torch.Tensor:
        """Return a tensor in the model's dtype, all of it finite."""
        self._check(name, shape, says)
        tensor: torch.Tensor = self.file.get_tensor(name).to(self.dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{self.path}: tensor {name} holds NaN or infinities as {self.dtype}")
        return tensor

    def _check(self, name: str, shape: tuple[int, ...], says: str) -> None:
        """Check shape and dtype of a tensor, neither of which needs its data."""
        part = self.file.get_slice(name)
        if part.get_dtype() not in _DTYPES:
            raise ModelError(
                f"{self.path}: tensor {name} is {part.get_dtype()}, want one of "
                f"{', '.join(_DTYPES)}"
            )
        if tuple(part.get_shape()) != shape:
            raise ModelError(
                f"{self.path}: tensor {name} is {list(part.get_shape())}, {says} {list(shape)}"
            )


def _end(role: Role) -> str:
    return role.value.removeprefix(".")


@contextmanager
def _opened(folder: Path) -> Iterator[Any]:
    """Open a folder's tensors. Raises ModelError, also for errors while they are read."""
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        others = sorted(other.name for other in folder.glob("*") if other.suffix in _PICKLES)
        found = f", only {', '.join(others[:_SHOWN])}, which is not read" if others else ""
        raise ModelError(f"{path} is missing{found}: save the adapter as safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ModelError(
            f"{path}: not a complete safetensors file ({error}): download it again"
        ) from error
