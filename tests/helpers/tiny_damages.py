"""Change configs and damage files of tiny models at random.

The same ``random.Random`` does the same, so that a failure can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

Json = Any
_LEFT_ALONE = ("transformers_version", "architectures", "model_type", "vocab_size", "dtype")
_OTHER: tuple[Json, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 5, 8, 16, 0.25, 0.5, 2.0, 1e6, "", "a", "gelu", "silu"),
    *([], {}, [1], ["full_attention"], ["sliding_attention"] * 3, {"rope_type": "default"}),
    *({"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}),
)


def _places(content: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all fields, those of nested objects too."""
    for name, value in content.items():
        if name not in _LEFT_ALONE and not name.endswith("_token_id"):
            yield (*path, name)
            if isinstance(value, dict):
                yield from _places(value, (*path, name))


def change_config(chance: random.Random, content: dict[str, Json]) -> str:
    """Change one field of a config in place; return what was done."""
    path = chance.choice([one for one in _places(content) if one != ("text_config",)])
    inside = content
    for name in path[:-1]:
        inside = inside[name]
    name, value = path[-1], inside[path[-1]]
    if chance.random() < 0.2:
        del inside[name]
        return f"{'.'.join(path)} was {value!r}, is absent"
    inside[name] = new = chance.choice([*_near(value), *chance.sample(_OTHER, 3)])
    return f"{'.'.join(path)} was {value!r}, is {new!r}"


def _near(value: Json) -> list[Json]:
    """Return values of the same type."""
    if isinstance(value, bool):
        return [not value] * 3
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value, value // 2, -value]
    if isinstance(value, float):
        return [value * 2, value / 3, -value, 1.0]
    if isinstance(value, list) and value:
        return [value[::-1], value[1:], [*value, value[0]], [*value[1:], value[0]]]
    return []


def damage_tensors(chance: random.Random, tensors: dict[str, torch.Tensor]) -> str:
    """Damage one tensor of a file; return what was done."""
    name = chance.choice(sorted(tensors))
    tensor = tensors[name]
    kind = chance.choice(["missing", "renamed", "shorter", "longer", "integers", "more", "turned"])
    if kind in ("missing", "renamed"):
        del tensors[name]
    if kind == "renamed":
        tensors[f"{name}_"] = tensor
    if kind == "more":
        tensors[f"{name.rpartition('.')[0]}.extra"] = tensor.clone()
    if kind == "shorter":
        tensors[name] = tensor[:-1].clone()
    if kind == "longer":
        tensors[name] = torch.cat([tensor, tensor[-1:]])
    if kind == "integers":
        tensors[name] = (100 * tensor).to(torch.int32)
    if kind == "turned":
        tensors[name] = tensor.flatten()[:, None].clone()
    return f"{name}: {kind}"
