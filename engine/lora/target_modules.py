"""Which modules an adapter_config.json targets, by PEFT's rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kiln.engine.models.fields import Fields

ALL_LINEAR = "all-linear"
_NOT_LINEAR = ("embed_tokens", "lm_head")  # what all-linear leaves out
_Names = re.Pattern[str] | tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class TargetModules:
    """The modules that an adapter was trained on.

    The tensors of an adapter decide where it is applied. A tensor whose module is not targeted
    means that config and tensors belong to different adapters. ``included`` None targets all: PEFT
    then uses a list by architecture, which it writes to the file when it saves.
    """

    included: _Names
    excluded: _Names
    layers: tuple[int, ...]  # empty: all
    layer_lists: tuple[str, ...]  # names of the lists of layers; empty: any
    tied: bool  # the adapters of embedding and LM head belong together

    @classmethod
    def read(cls, content: Mapping[str, Any], fields: Fields) -> TargetModules:
        """Read the keys of adapter_config.json. Raises ModelError naming the key."""
        layers = content.get("layers_to_transform")
        listed = [] if layers is None else layers if isinstance(layers, list) else [layers]
        if not all(type(layer) is int and layer >= 0 for layer in listed):
            raise fields.error("layers_to_transform", "want an index of a layer, or a list of them")
        pattern = _names(content, fields, "layers_pattern", as_list=True)
        included = _names(content, fields, "target_modules")
        if listed and isinstance(included, re.Pattern):
            raise fields.error(
                "layers_to_transform", "want null if target_modules is an expression"
            )
        assert not isinstance(pattern, re.Pattern)
        return cls(
            included,
            _names(content, fields, "exclude_modules"),
            tuple(listed),
            pattern or (),
            fields.flag("ensure_weight_tying", False),
        )

    def has(self, module: str) -> bool:
        """Whether a module, such as "model.layers.0.mlp.up_proj", is targeted."""
        if self.tied and module.rpartition(".")[2] in _NOT_LINEAR:
            return any(self._has(name) for name in ("model.embed_tokens", "lm_head"))
        return self._has(module)

    def _has(self, module: str) -> bool:
        if self.excluded is not None and _matches(self.excluded, module):
            return False
        if self.included is None:
            return True
        if not _matches(self.included, module):
            return False
        named = isinstance(self.included, tuple) and module in self.included
        return named or not self.layers or self._layer_of(module) in self.layers

    def _layer_of(self, module: str) -> int | None:
        """Return the index of a module's layer: the first number behind a list of layers."""
        for name in self.layer_lists or (r"[^.]*",):
            found = re.match(rf"(?:^|.*?\.){name}\.(\d+)\.", module)
            if found:
                return int(found[1])
        return None


def _matches(names: re.Pattern[str] | tuple[str, ...], module: str) -> bool:
    if isinstance(names, re.Pattern):
        return names.fullmatch(module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _names(content: Mapping[str, Any], fields: Fields, key: str, as_list: bool = False) -> _Names:
    """Return a list of names, or an expression; a single name with ``as_list``."""
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return _compiled_names(tuple(value), fields, key) if as_list else tuple(value)
    if not isinstance(value, str):
        raise fields.error(key, "want a list of names, or an expression")
    if as_list:
        return _compiled_names((value,) if value else (), fields, key)
    if key == "target_modules" and value.lower() == ALL_LINEAR:
        return re.compile(rf"(?!(?:.*\.)?(?:{'|'.join(_NOT_LINEAR)})$).*")
    return _compiled(value, fields, key)


def _compiled_names(names: tuple[str, ...], fields: Fields, key: str) -> tuple[str, ...]:
    for name in names:
        _compiled(name, fields, key)
    return names


def _compiled(expression: str, fields: Fields, key: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise fields.error(key, f"which is not an expression: {error}") from error
