"""Tiny models with random weights, one module a family, and what transformers makes of them.

Every weight is random: norms and biases too, because a missing one is not seen at its initial
value. Windows are shorter than most prompts, and sizes are odd.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from greedy_models import COMMON, MODELS

import tiny

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
_EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


def plain(model: Any, token_ids: torch.Tensor, total: int) -> torch.Tensor:
    """Return the logits [tokens, vocab_size] of token_ids [tokens]."""
    logits: torch.Tensor = model(token_ids[None]).logits[0]
    return logits


@dataclass(frozen=True)
class Tiny:
    """A tiny model.

    ``config`` names a config class of transformers, which gets COMMON and ``fields``. ``edit``
    changes config.json as older files have it. ``logits(model, token_ids, total)`` is what the
    family computes for a request that may grow to ``total`` tokens. ``targets``: where adapters
    act. ``small``: what the embeddings are multiplied by, so that they do not outweigh the layers.
    ``make`` makes another model than that of AutoModelForCausalLM; ``prepare`` changes its weights.
    """

    name: str
    config: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[dict[str, Any]], None] = lambda content: None
    logits: Callable[[Any, torch.Tensor, int], torch.Tensor] = plain
    targets: tuple[str, ...] = DENSE
    small: float = 0.2
    make: Callable[[Any], Any] | None = None
    prepare: Callable[[Any], None] = lambda model: None

    def save(self, folder: Path, **more: Any) -> Any:
        """Write the model to a folder, and return that of transformers; ``more``: fields."""
        import transformers

        torch.manual_seed(3)
        config = getattr(transformers, self.config)(**{**COMMON, **self.fields, **more})
        make = self.make or transformers.AutoModelForCausalLM.from_config
        model = make(config).float().eval()
        model.set_attn_implementation("eager")  # others drop soft caps in some versions
        randomise(model, self.small)
        self.prepare(model)
        model.save_pretrained(folder)
        path = folder / "config.json"
        content = json.loads(path.read_text())
        self.edit(content)
        path.write_text(json.dumps(content))
        return model


@torch.no_grad()
def randomise(model: Any, small: float) -> None:
    """Give every parameter, and every bias that is a buffer, random values."""
    tensors = dict(model.named_parameters())
    tensors |= {name: one for name, one in model.named_buffers() if name.endswith("bias")}
    for name, tensor in tensors.items():
        if tensor.dim() == 1:
            torch.nn.init.normal_(tensor, 0.0 if name.endswith(("bias", "sinks")) else 1.0, 0.3)
        else:
            scale = small if name.endswith(_EMBEDDINGS) else 1.0
            torch.nn.init.normal_(tensor, 0.0, 0.3 * scale)


@cache
def all_tiny() -> dict[str, Tiny]:
    """Return every tiny model by name."""
    modules = sorted(one.name for one in pkgutil.iter_modules(tiny.__path__))
    found = [importlib.import_module(f"tiny.{name}") for name in modules if name != "model"]
    plain_ones = [
        Tiny(name, f"{prefix}Config", more, small=1.0, targets=ATTENTION if "moe" in name or
             "mixtral" in name else DENSE)
        for name, (prefix, more) in MODELS.items()
    ]  # fmt: skip
    return {one.name: one for one in [*plain_ones, *(one for m in found for one in m.MODELS)]}
