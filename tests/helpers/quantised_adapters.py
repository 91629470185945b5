"""LoRA adapters of the projections of quantised_folders' models, in PEFT's files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from emulated_models import Adapter
from quantised_folders import Made, layers_of
from safetensors.torch import save_file


def write_adapter(folder: Path, made: Made, rank: int, targets: tuple[str, ...]) -> Adapter:
    """Write an adapter, and return it as the emulation takes it. Experts take none."""
    draw = torch.Generator().manual_seed(rank)
    scaling, tensors, adapter = 2.0, {}, {}
    for name, outputs, inputs in layers_of(made.config):
        if "experts" in name or not name.endswith(targets):
            continue
        first = torch.randn(rank, inputs, generator=draw) / inputs**0.5
        second = 0.3 * torch.randn(outputs, rank, generator=draw) / rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.{name}.lora_B.weight"] = second
        adapter[name] = (first.double(), scaling * second.double())
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scaling * rank,
        "target_modules": list(targets),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return adapter
