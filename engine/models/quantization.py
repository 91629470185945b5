"""What a checkpoint says of how its weights are quantised: one module of ``formats`` reads it."""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from kiln.engine.errors import ConfigError
from kiln.engine.models import formats
from kiln.engine.models.fields import Fields
from kiln.engine.models.model_folder import read_json
from kiln.engine.models.refused_formats import refuse_formats
from kiln.engine.models.scheme import DENSE, Scheme
from kiln.engine.models.weights import Weights

_KEY = "quantization_config"


class Quantization(ABC):
    """The weight scheme of every module of a checkpoint. Equal ones read equal checkpoints.

    ``method`` is the name in ``quant_method`` and of ``--quantization``. ``bits``: of a quantised
    weight with its scales, roughly, for estimates of memory.
    """

    method: str
    bits: float
    rounds_activations = False  # whether products round their inputs, which takes a kernel

    @property
    def schemes(self) -> Collection[Scheme]:
        """The schemes of its modules, without that of floats, as far as the config tells."""
        return ()

    @abstractmethod
    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of a module.

        ``name`` is the checkpoint's, such as "model.layers.3.self_attn.q_proj". ``role`` is what
        Kiln builds of it: "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "router",
        "shared_expert_gate", "lm_head" or "embed_tokens". Raises ModelError.
        """


@dataclass(frozen=True, slots=True)
class Format:
    """A format of quantised checkpoints.

    ``read`` takes quantization_config. Raises ModelError by name for what Kiln does not support.
    ``file``: where checkpoints without quantization_config have the same fields, and ``read_file``
    reads them. ``at_load``: quantises a checkpoint without any, for ``--quantization``.
    """

    method: str
    read: Callable[[Fields], Quantization]
    file: str = ""
    read_file: Callable[[Fields], Quantization] | None = None
    at_load: Callable[[], Quantization] | None = None


@dataclass(frozen=True)
class Unquantized(Quantization):
    """Floats everywhere."""

    method = ""
    bits = 0.0

    def scheme(self, name: str, role: str, source: Weights) -> Scheme:
        """Return the scheme of floats."""
        return DENSE


UNQUANTIZED = Unquantized()


@cache
def known_formats() -> MappingProxyType[str, Format]:
    """Return the format of each quant_method."""
    found: dict[str, Format] = {}
    for module in sorted(one.name for one in pkgutil.iter_modules(formats.__path__)):
        own: Format = importlib.import_module(f"{formats.__name__}.{module}").FORMAT
        found[own.method] = own
    return MappingProxyType(found)


def read_quantization(fields: Fields, folder: Path, wanted: str | None = None) -> Quantization:
    """Return how a model folder's weights are quantised.

    ``fields``: of config.json. ``wanted``: what the user asked for; weights that are not quantised
    are then when they are loaded. Raises ModelError if Kiln does not support it, ConfigError if
    another was wanted.
    """
    stored = _stored(fields, folder)
    if wanted is None or (wanted and stored.method == wanted):
        return stored
    if stored.method:
        raise ConfigError(
            f"quantization={wanted!r}: the checkpoint is quantised already, by "
            f"{stored.method!r}: leave the option out"
        )
    format_ = known_formats().get(wanted)
    if format_ is None or format_.at_load is None:
        able = [name for name, one in known_formats().items() if one.at_load is not None]
        raise ConfigError(
            f"quantization={wanted!r}: the checkpoint is not quantised, and Kiln can quantise it "
            f"only by {', '.join(map(repr, able))}"
        )
    return format_.at_load()


def _stored(fields: Fields, folder: Path) -> Quantization:
    """Return what the files of a folder say; those that say something must agree."""
    known, found = known_formats(), []
    own = fields.group(_KEY)
    if own is not None:
        refuse_formats(own)
        method = own.text("quant_method")
        if method not in known:
            raise own.error("quant_method", f"Kiln supports {', '.join(sorted(known))}")
        found.append(known[method].read(own))
    for format_ in known.values():
        path = folder / format_.file
        if format_.file and path.is_file() and format_.read_file is not None:
            found.append(format_.read_file(Fields(read_json(path), path)))
            if found[-1] != found[0]:
                raise fields.error(_KEY, f"but {path} says something else: remove the wrong one")
    return found[0] if found else UNQUANTIZED


def refuse_others(fields: Fields, known: Collection[str]) -> None:
    """Raise ModelError for a field that is not among ``known`` and is switched on."""
    for name in fields.switched_on():
        if name not in known:
            raise fields.error(name, "Kiln does not know this field of a quantised checkpoint")


_FUSED = {  # what a fused layer of other engines is made of
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def is_listed(name: str, entries: Collection[str]) -> bool:
    """Whether one of the entries names a module, a module that it is in, or its last parts.

    Other engines fuse projections. An entry may name such a fused layer, for example qkv_proj, and
    then stands for q_proj, k_proj and v_proj.
    """
    place, _, own = name.rpartition(".")
    names = [name, *(f"{place}.{fused}" for fused, parts in _FUSED.items() if own in parts)]
    return any(
        f".{entry}." in f".{one}." and (one.startswith(entry) or one.endswith(entry))
        for entry in entries
        for one in names
    )
