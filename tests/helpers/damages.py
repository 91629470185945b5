"""Damage quantised checkpoints at random: tensors, their values, fields of the config, the file.

The same ``random.Random`` makes the same damage, so that a failure can be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from packers.packer import Packed
from quantised_folders import Made, write_folder
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.float8_e4m3fn)
IGNORED = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 8, 16, 32, 100, 127, 128, 2**70, 0.5, 128.0, "", "a"),
    *("none", "int", "static", "token", "channel", "tensor", "group", "block", "dynamic"),
    *([], {}, [128], [128, 64], [64, 64], [[]], ["lm_head"], ["re:("], [None], {"a": 1}),
)


@dataclass(frozen=True)
class Damage:
    """What was done to a checkpoint. ``told``: words of which a refusal must hold one.

    ``modules``: what the file then means, where it still means something.
    """

    what: str
    told: tuple[str, ...]
    modules: Mapping[str, Packed] = field(default_factory=dict)


def damage(chance: random.Random, made: Made, folder: Path) -> Damage:
    """Write a damaged copy of a checkpoint to ``folder``."""
    config = json.loads((made.folder / "config.json").read_text())
    tensors = load_file(made.folder / "model.safetensors")
    kind = chance.random()
    if kind < 0.03:
        write_folder(folder, config, tensors)
        return _change_file(chance, folder / "model.safetensors")
    change = _change_config(chance, made, config) if kind < 0.4 else None
    change = change or _change_tensor(chance, made, tensors)
    write_folder(folder, config, tensors)
    return change


def _change_file(chance: random.Random, path: Path) -> Damage:
    data = path.read_bytes()
    if chance.random() < 0.5:
        path.write_bytes(data[: chance.randrange(len(data))])
    else:
        path.write_bytes(chance.randbytes(40) + data[40:])
    return Damage("the file is cut or overwritten", (path.name,))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys on the way to each value inside of another."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner:
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from _paths(one, (*path, key))


def _change_config(chance: random.Random, made: Made, config: dict[str, Any]) -> Damage:
    own = config["quantization_config"]
    # Without its checkpoint_format a file of gptq_v2 is a whole file of gptq, with other numbers.
    path = chance.choice([one for one in _paths(own) if one != ("checkpoint_format",)])
    place = own
    for key in path[:-1]:
        place = place[key]
    last, kind = path[-1], chance.randrange(5)
    # A wrong field may also show in the tensors that it speaks of.
    told = ("quantization_config", "model.layers.")
    if kind == 0:
        del place[last]
        return Damage(f"{path} is removed", told)
    if kind == 1 and isinstance(place, dict):
        name = chance.choice((f"{last}s", "bits_", "group", "strategy_", "x" * 100))
        place[name] = chance.choice([one for one in VALUES if one])
        return Damage(f"{name} is {place[name]!r} beside {path}", (*told, name[:60]))
    if kind == 2:
        module = chance.choice(list(made.modules))
        entry = chance.choice((module, module.rpartition(".")[2], "lm_head", f"re:.*{module[-8:]}"))
        name = chance.choice(IGNORED)
        own[name] = [entry]
        return Damage(f"{name} is {own[name]}", (*told, name))
    place[last] = chance.choice(VALUES)
    return Damage(f"{path} is {place[last]!r}", told)


def _change_tensor(chance: random.Random, made: Made, tensors: Tensors) -> Damage:
    """Change a tensor of a quantised module."""
    name = chance.choice(sorted(made.packer.stored(made.modules)))
    module = name.rpartition(".")[0]
    told = chance.choice(_CHANGES)(chance, tensors, name)
    modules = dict(made.modules)
    if told == _ZEROS and not name.endswith("input_scale"):
        packed = modules[module]
        modules[module] = replace(packed, weight=torch.zeros_like(packed.weight))
    return Damage(f"{name} {told}", (f"{module}.",), modules)


_ZEROS = "has scales of zero"


def _remove(chance: random.Random, tensors: Tensors, name: str) -> str:
    del tensors[name]
    return "is removed"


def _rename(chance: random.Random, tensors: Tensors, name: str) -> str:
    new = chance.choice((f"{name}s", name.replace("weight", "wt"), f"{name}_inv", name.upper()))
    tensors[new if new != name else f"{name}_"] = tensors.pop(name)
    return f"is renamed to {new}"


def _add(chance: random.Random, tensors: Tensors, name: str) -> str:
    place = name.rpartition(".")[0]
    new = f"{place}.{chance.choice(('weight_scale_2', 'weight_zero_point', 'absmax', 'g_idx'))}"
    if new in tensors:
        return _remove(chance, tensors, new)
    tensors[new] = torch.ones(3)
    return f"has {new} beside it"


def _cut(chance: random.Random, tensors: Tensors, name: str) -> str:
    one = tensors[name]
    if not one.dim():
        tensors[name] = one.expand(2).clone()
        return "has two elements"
    dim = chance.randrange(one.dim())
    size = chance.choice((one.shape[dim] - 1, one.shape[dim] // 2, 0, one.shape[dim] + 1))
    index = torch.arange(size) % one.shape[dim]
    tensors[name] = one.view(_bytes_of(one)).index_select(dim, index).view(one.dtype)
    return f"has the size {size} instead of {one.shape[dim]}"


def _reshape(chance: random.Random, tensors: Tensors, name: str) -> str:
    one = tensors[name]
    shapes = [(1, *one.shape), (*one.shape, 1), (one.numel(),), one.shape[::-1]]
    tensors[name] = one.reshape(chance.choice(shapes)).clone()
    return f"is {list(tensors[name].shape)} instead of {list(one.shape)}"


def _retype(chance: random.Random, tensors: Tensors, name: str) -> str:
    one = tensors[name]
    dtype = chance.choice(DTYPES)
    if one.dtype in FLOATS:  # to another float only where nothing is lost
        while dtype in FLOATS and not torch.equal(one.double(), one.to(dtype).double()):
            dtype = chance.choice(DTYPES)
    tensors[name] = one.float().to(dtype) if one.dtype.itemsize == 1 else one.to(dtype)
    return f"is {dtype} instead of {one.dtype}"


def _plant(chance: random.Random, tensors: Tensors, name: str) -> str:
    """Write a value that no packer writes."""
    one = tensors[name].clone()
    flat = one.view(-1)
    at = chance.randrange(flat.numel())
    if one.dtype in FLOATS:
        value = chance.choice((torch.nan, torch.inf, -1.0, "zeros"))
        if value == "zeros":
            tensors[name] = torch.zeros_like(one)
            return _ZEROS
        flat[at] = value
    elif one.dtype == torch.float8_e4m3fn:
        value = chance.choice((0x7F, 0xFF))
        flat.view(torch.uint8)[at] = value
    elif one.dtype == torch.uint8 and name.endswith("scales"):
        value = 255
        flat[at] = value
    elif name.endswith(("g_idx", "weight_shape")):
        value = chance.choice((-1, 10**6, 2**31 - 1))
        flat[at] = value
    else:
        return _remove(chance, tensors, name)  # every code of integers means something
    tensors[name] = one
    return f"has {value} at {at}"


def _bytes_of(one: torch.Tensor) -> torch.dtype:
    """Return a dtype of the same size that torch can index."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]


_CHANGES: tuple[Callable[[random.Random, Tensors, str], str], ...] = (
    *(_remove, _rename, _add, _cut, _cut, _reshape, _reshape, _retype, _retype, _plant, _plant),
    _plant,
)
