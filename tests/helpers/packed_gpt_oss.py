"""A tiny gpt-oss as it was published, with experts in MXFP4."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from packers.mxfp4 import PACKERS
from safetensors.torch import load_file, save_file
from tiny.model import all_tiny

(MXFP4,) = PACKERS


def save_packed(folder: Path) -> Callable[[torch.Tensor, int], torch.Tensor]:
    """Write the model, and return what transformers computes with the same weights as floats."""
    one = all_tiny()["gpt-oss-published"]
    one = replace(one, fields={**one.fields, "hidden_size": 64, "intermediate_size": 96})
    model = one.save(folder)
    _pack_experts(model, folder)

    def logits(token_ids: torch.Tensor, total: int) -> torch.Tensor:
        with torch.inference_mode():
            return one.logits(model, token_ids, total)

    return logits


@torch.no_grad()
def _pack_experts(model: Any, folder: Path) -> None:
    """Store a gpt-oss as it was published, and let transformers' model have the same weights."""
    generator, made = torch.Generator(), {}
    for index, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for expert in range(experts.num_experts):
            both = experts.gate_up_proj[expert].T
            for name, values in (
                ("gate_proj", both[::2]),
                ("up_proj", both[1::2]),
                ("down_proj", experts.down_proj[expert].T),
            ):
                packed = MXFP4.pack(values.double(), generator)
                values.copy_(packed.weight)
                made[f"model.layers.{index}.mlp.experts.{expert}.{name}"] = packed
    (path,) = folder.glob("*.safetensors")
    rest = {
        name: one for name, one in load_file(path).items()
        if not name.endswith(("gate_up_proj", "down_proj"))
    }  # fmt: skip
    save_file(rest | MXFP4.stored(made), path)
    config = folder / "config.json"
    content = json.loads(config.read_text()) | {"quantization_config": dict(MXFP4.config)}
    config.write_text(json.dumps(content))
