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


Stored = Callable[[Mapping[str, Packed]], dict[str, torch.Tensor]]
"""(modules by name) -> the tensors of the checkpoint."""


def own_tensors(modules: Mapping[str, Packed]) -> dict[str, torch.Tensor]:
    """Return each tensor under the name of its module and its suffix."""
    return {
        f"{name}.{suffix}": tensor.contiguous().clone()
        for name, module in modules.items()
        for suffix, tensor in module.tensors.items()
    }


def everything(name: str) -> bool:
    """Pack every module."""
    return True


@dataclass(frozen=True)
class Packer:
    """One kind of checkpoint. ``config``: its quantization_config. ``rounded`` None: weights only.

    It packs the projections of the layers, experts included, whose names ``packs`` takes, but no
    router, embedding or head. ``stored``: how a checkpoint holds modules.
    """

    name: str
    config: Mapping[str, Any]
    pack: Pack
    rounded: Rounded | None = None
    stored: Stored = own_tensors
    packs: Callable[[str], bool] = everything


def all_packers() -> dict[str, Packer]:
    """Return every packer by name."""
    modules = sorted(one.name for one in pkgutil.iter_modules(packers.__path__))
    found = [importlib.import_module(f"packers.{name}") for name in modules if name != "packer"]
    return {packer.name: packer for module in found for packer in module.PACKERS}
