"""What a packer is, and where all of them are."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

import packers


@dataclass(frozen=True)
class Packed:
    """A module's tensors by suffix, and the weight [out, in] float64 that they stand for."""

    tensors: Mapping[str, torch.Tensor]
    weight: torch.Tensor


Pack = Callable[[torch.Tensor, torch.Generator], Packed]
"""(weight [out, in] float64, generator) -> a module that is near to it, by the format's rules."""

Rounded = Callable[[torch.Tensor, Packed], torch.Tensor]
"""(x [rows, in] float64, module) -> x as the checkpoint's rule rounds it, float64."""


@dataclass(frozen=True)
class Packer:
    """One kind of checkpoint. ``config``: its quantization_config. ``rounded`` None: weights only.

    It packs every projection of the layers, experts included, but no router, embedding or head.
    """

    name: str
    config: Mapping[str, Any]
    pack: Pack
    rounded: Rounded | None = None


def all_packers() -> dict[str, Packer]:
    """Return every packer by name."""
    modules = sorted(one.name for one in pkgutil.iter_modules(packers.__path__))
    found = [importlib.import_module(f"packers.{name}") for name in modules if name != "packer"]
    return {packer.name: packer for module in found for packer in module.PACKERS}
