"""Tiny models of random weights for embeddings, and sentence-transformers' pooling of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from greedy_models import COMMON, MODELS

_TYPE = "sentence_transformers.models."
POOLINGS = ("lasttoken", "mean_tokens", "cls_token")


def save_random(folder: Path, name: str = "qwen3", *, headless: bool = True, **sizes: int) -> Any:
    """Save a model of ``greedy_models``, without its head or with it; return what has no head."""
    import transformers

    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **more, **sizes})
    torch.manual_seed(3)
    kind = transformers.AutoModel if headless else transformers.AutoModelForCausalLM
    network = kind.from_config(config).float().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    network.save_pretrained(folder)
    return network if headless else network.model


def write_modules(
    folder: Path, pooling: str = "lasttoken", *, normalize: bool = True, **settings: Any
) -> None:
    """Write the files that sentence-transformers puts beside a model."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": _TYPE + kind}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    config = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    config |= {"word_embedding_dimension": COMMON["hidden_size"], "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config | settings))


def expected(
    network: Any,
    prompt: list[int],
    pooling: str = "lasttoken",
    *,
    normalize: bool = True,
    dimensions: int | None = None,
) -> torch.Tensor:
    """What sentence-transformers makes of transformers' ``last_hidden_state``."""
    with torch.no_grad():
        states = network(torch.tensor([prompt])).last_hidden_state[0].double()
    pooled = {"lasttoken": states[-1], "mean_tokens": states.mean(0), "cls_token": states[0]}
    vector = pooled[pooling][:dimensions]
    return vector / vector.norm() if normalize else vector
