"""Tiny checkpoints with quantised weights, and their twins: the same weights as plain floats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from depth import at_depth
from packers.packer import Packed, Packer, all_packers
from safetensors.torch import save_file

# q, k and v have 256, 64 and 64 outputs: the third starts inside a block of 128. So do the shares
# of 2 ranks, and the inputs of down_proj are 3 blocks.
COMMON = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
    "dtype": "float32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "attention_bias": True, "mlp_bias": False,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "norm_topk_prob": True, "mlp_only_layers": [0], "attention_bias": False,
    },
}  # fmt: skip
FUSED = {  # q, k and v are one layer, and gate and up; differs from "llama" in these
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": False,
}  # fmt: skip
# Parts of a layer differ in size, so that the scale of one is wrong for another.
_GAINS = {"q_proj": 1.0, "k_proj": 2.0, "v_proj": 0.5, "gate_proj": 2.0, "up_proj": 0.7}


@dataclass(frozen=True)
class Made:
    """A quantised checkpoint.

    ``folder`` holds it, ``twin`` the same model with plain weights in float32. ``tensors``: the
    twin's in float64; ``modules``: the quantised ones by the names of their layers.
    """

    packer: Packer
    config: Mapping[str, Any]
    folder: Path
    twin: Path
    tensors: Mapping[str, torch.Tensor]
    modules: Mapping[str, Packed]


def layers_of(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield every projection of the layers: its name, its outputs, its inputs."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        if config["model_type"] == FUSED["model_type"]:
            yield f"{place}self_attn.qkv_proj", (heads + 2 * kv_heads) * head, hidden
            yield f"{place}self_attn.o_proj", hidden, heads * head
            yield f"{place}mlp.gate_up_proj", 2 * config["intermediate_size"], hidden
            yield f"{place}mlp.down_proj", hidden, config["intermediate_size"]
            continue
        yield f"{place}self_attn.q_proj", heads * head, hidden
        yield f"{place}self_attn.k_proj", kv_heads * head, hidden
        yield f"{place}self_attn.v_proj", kv_heads * head, hidden
        yield f"{place}self_attn.o_proj", hidden, heads * head
        inner, mlps = config["intermediate_size"], [f"{place}mlp."]
        if is_sparse(config, layer):
            inner = config["moe_intermediate_size"]
            mlps = [f"{place}mlp.experts.{index}." for index in range(config["num_experts"])]
        for mlp in mlps:
            yield f"{mlp}gate_proj", inner, hidden
            yield f"{mlp}up_proj", inner, hidden
            yield f"{mlp}down_proj", hidden, inner


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts."""
    return "num_experts" in config and layer not in config["mlp_only_layers"]


def plain_tensors(config: Mapping[str, Any], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Return all that is not quantised, in float64 with the values of float32."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]

    def normal(mean: float, std: float, *shape: int) -> torch.Tensor:
        return (mean + std * torch.randn(*shape, generator=draw)).double()

    made = {
        "model.embed_tokens.weight": normal(0, 1, vocabulary, hidden),
        "model.norm.weight": normal(1, 0.2, hidden),
        "lm_head.weight": normal(0, 0.1, vocabulary, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            made[f"{place}{norm}.weight"] = normal(1, 0.2, hidden)
        if config["model_type"].startswith("qwen3"):
            for norm in ("q_norm", "k_norm"):
                made[f"{place}self_attn.{norm}.weight"] = normal(1, 0.2, config["head_dim"])
        if is_sparse(config, layer):
            made[f"{place}mlp.gate.weight"] = normal(0, 0.1, config["num_experts"], hidden)
    if config["attention_bias"]:
        for name, outputs, _ in layers_of(config):
            if "self_attn" in name:
                made[f"{name}.bias"] = normal(0, 0.2, outputs)
    return made


def write(
    root: Path, packer: Packer, family: str, seed: int = 0, config: Mapping[str, Any] | None = None
) -> Made:
    """Write a checkpoint and its twin below ``root``. ``config``: fields that differ."""
    fields = {**COMMON, **FAMILIES[family], **(config or {})}
    draw = torch.Generator().manual_seed(seed)
    plain = plain_tensors(fields, draw)
    modules = {}
    for name, outputs, inputs in layers_of(fields):
        gain = 1.5 * _GAINS.get(name.rpartition(".")[2], 1.0) / inputs**0.5
        weight = gain * torch.randn(outputs, inputs, generator=draw, dtype=torch.float64)
        if packer.packs(name):
            modules[name] = packer.pack(weight, draw)
        else:
            plain[f"{name}.weight"] = weight.float().double()
    stored = {name: one.float() for name, one in plain.items()}
    weights = {f"{name}.weight": module.weight for name, module in modules.items()}
    made = Made(packer, fields, root / "packed", root / "twin", plain | weights, modules)
    own = {"quantization_config": dict(packer.config)} if packer.config else {}
    write_folder(made.folder, fields | own, stored | packer.stored(modules))
    write_folder(made.twin, fields, stored | {name: one.float() for name, one in weights.items()})
    return made


def families_of(packer: Packer) -> list[str]:
    """Return the families of which a packer packs any layer."""
    return [
        family
        for family, own in FAMILIES.items()
        if any(packer.packs(name) for name, _, _ in layers_of({**COMMON, **own}))
    ]


def cases(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return packers with a family that they pack, taken in turn; at depth, with each."""
    found, known = [], all_packers()
    for index, name in enumerate(names):
        own = families_of(known[name])
        found += [(name, family) for family in at_depth([own[index % len(own)]], own)]
    return found


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a checkpoint of one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
