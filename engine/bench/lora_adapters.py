"""Random LoRA adapters for a measurement: on disk once, and loaded under several names."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kiln.engine.config import EngineConfig, LoRAConfig, LoRAModule
from kiln.engine.lora.sites import Part, Sites
from kiln.engine.models.loader import build_without_weights
from kiln.engine.models.registry import read_model

TARGETS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class RandomAdapter:
    """An adapter of one rank on every projection of attention and MLP, experts left out.

    ``dtype``: that of its tensors. ``std``: the standard deviation of their numbers.
    """

    targets: tuple[Part, ...]
    rank: int
    dtype: torch.dtype
    std: float = 0.02
    seed: int = 0

    @classmethod
    def of_model(
        cls,
        folder: Path,
        rank: int,
        dtype: torch.dtype,
        *,
        std: float = 0.02,
        seed: int = 0,
        overrides: Mapping[str, Any] | None = None,
    ) -> RandomAdapter:
        """Return the adapter of the model in a folder. Raises ModelError.

        ``overrides`` are merged into config.json.
        """
        sites = Sites()
        build_without_weights(*read_model(folder, overrides=overrides), sites)
        targets = tuple(one for one in sites.parts if one.name.rpartition(".")[2] in TARGETS)
        return cls(targets, rank, dtype, std, seed)

    @property
    def num_bytes(self) -> int:
        """The bytes of A and B of all targets."""
        width = sum(each.input_size + each.output_size for each in self.targets)
        return width * self.rank * self.dtype.itemsize

    def save(self, folder: Path) -> None:
        """Write it in PEFT's format, with weights that are equal in every run."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(self.tensors()), folder / "adapter_model.safetensors")
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.rank,
            "lora_alpha": self.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": sorted({each.name.rpartition(".")[2] for each in self.targets}),
        }
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")

    def configure(self, config: EngineConfig, folder: Path, count: int) -> EngineConfig:
        """Return a config that loads it from a folder ``count`` times, under as many names.

        An engine keeps what is loaded under one name apart from the others, so that each has
        memory of its own on the device.
        """
        modules = tuple(LoRAModule(f"adapter-{number + 1}", str(folder)) for number in range(count))
        needed = 1 + count * self.num_bytes / _GIB
        memory = max(LoRAConfig().host_memory_gib, needed)
        lora = LoRAConfig(modules, max_lora_rank=self.rank, host_memory_gib=memory)
        return replace(config, lora=lora)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield A and B of each target by their names in a file, equal in every run."""
        generator = torch.Generator().manual_seed(self.seed)
        for each in self.targets:
            shapes = {"A": (self.rank, each.input_size), "B": (each.output_size, self.rank)}
            for letter, shape in shapes.items():
                values = torch.randn(shape, generator=generator) * self.std
                yield f"base_model.model.{each.name}.lora_{letter}.weight", values.to(self.dtype)
