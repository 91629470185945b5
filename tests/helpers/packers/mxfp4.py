"""MXFP4, as gpt-oss stores its experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from packers.packer import Packed, Packer

VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
VALUES = torch.cat((VALUES, -VALUES))

STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def pack(weight: torch.Tensor, generator: torch.Generator) -> Packed:
    """Pack in blocks of 32 inputs, with the power of two that lets 6 be the largest."""
    outputs, inputs = weight.shape
    blocks = weight.view(outputs, inputs // 32, 32)
    exponents = torch.ceil(torch.log2(blocks.abs().amax(2) / 6)).clamp(-127, 125)
    scaled = blocks / 2.0 ** exponents[..., None]
    codes = (scaled[..., None] - VALUES).abs().argmin(-1).to(torch.uint8)
    exact = VALUES[codes.long()] * 2.0 ** exponents[..., None]
    tensors = {
        "blocks": codes[..., ::2] | codes[..., 1::2] << 4,
        "scales": (exponents + 127).to(torch.uint8),
    }
    return Packed(tensors, exact.view(outputs, inputs))


def stacked(modules: Mapping[str, Packed]) -> dict[str, torch.Tensor]:
    """Return the tensors of all experts; the rows of gate and up take turns."""
    made: dict[str, torch.Tensor] = {}
    for place in sorted({name.rpartition(".")[0].rpartition(".")[0] for name in modules}):
        count = len({name.split(".")[-2] for name in modules if name.startswith(f"{place}.")})
        for stem, parts in STACKS.items():
            names = [[f"{place}.{expert}.{part}" for part in parts] for expert in range(count)]
            for suffix in ("blocks", "scales") if names[0][0] in modules else ():
                made[f"{place}.{stem}_{suffix}"] = torch.stack(
                    [
                        torch.stack([modules[name].tensors[suffix] for name in own], 1).flatten(
                            0, 1
                        )
                        for own in names
                    ]
                )
    return made


def is_expert(name: str) -> bool:
    """Pack only experts."""
    return ".experts." in name


CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
PACKERS = [Packer("mxfp4", CONFIG, pack, stored=stacked, packs=is_expert)]
