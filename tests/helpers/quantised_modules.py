"""Single modules of a quantised checkpoint, written to a folder and read by Kiln's schemes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kiln.engine.models.fields import Fields
from kiln.engine.models.quantization import Quantization, read_quantization
from kiln.engine.models.safetensors_weights import SafetensorsWeights
from kiln.engine.models.scheme import Part, Scheme
from kiln.engine.models.split import Share, all_of

CPU = torch.device("cpu")


def config(folder: Path, quantization: Mapping[str, Any] | None) -> Quantization:
    """Return what a config.json with this quantization_config says."""
    values = {} if quantization is None else {"quantization_config": dict(quantization)}
    return read_quantization(Fields(values, folder / "config.json"), folder)


def save(folder: Path, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint with the tensors of one module, by suffix."""
    stored = {f"{name}.{suffix}": one.contiguous() for suffix, one in tensors.items()}
    save_file(stored, folder / "model.safetensors")


class Module:
    """A module of a folder. ``size``: its outputs and inputs."""

    def __init__(
        self,
        folder: Path,
        quantization: Mapping[str, Any],
        name: str,
        size: tuple[int, int],
        role: str = "qkv_proj",
    ) -> None:
        self.source = SafetensorsWeights(folder)
        self._quantization = config(folder, quantization)
        self._name, self._size, self._role = name, size, role

    def scheme(self) -> Scheme:
        """Return the module's scheme. Raises ModelError."""
        return self._quantization.scheme(self._name, self._role, self.source)

    def read(self, outputs: Share | None = None, inputs: Share | None = None) -> Any:
        """Return the module's weight, or a rank's share of it. Raises ModelError."""
        whole = (all_of(size) for size in self._size)
        shares = (own or one for own, one in zip((outputs, inputs), whole, strict=True))
        part = Part(self.source, "layers.0.any", self._name, *shares, torch.float32, CPU)
        return self.scheme().linear([part])

    def values(self, outputs: Share | None = None, inputs: Share | None = None) -> torch.Tensor:
        """Return the weight in float64, without inputs behind. Raises ModelError."""
        weight = self.read(outputs, inputs)
        room = self._size[1] if inputs is None else inputs.room
        return weight.dequantized(slice(None), torch.float64)[:, :room]  # type: ignore[no-any-return]
