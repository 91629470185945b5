"""Which modules an adapter_config.json targets, by PEFT's rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kiln.engine.models.expressions import Expression
from kiln.engine.models.fields import Fields

ALL_LINEAR = "all-linear"
NOT_LINEAR = ("embed_tokens", "lm_head")  # what all-linear leaves out
EMBEDDINGS = ("model.embed_tokens", "lm_head")  # which are one where they are tied
_Names = Expression | tuple[str, ...] | None
_BEFORE, _BEHIND = r"(?:^|.*?\.)", r"\.(\d+)\."  # around the name of a list of layers


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
    layer_lists: tuple[Expression, ...]  # the lists of layers, and an index as the first group
    tied: bool  # the adapters of embedding and LM head belong together

    @classmethod
    def read(cls, content: Mapping[str, Any], fields: Fields) -> TargetModules:
        """Read the keys of adapter_config.json. Raises ModelError naming the key."""
        layers = content.get("layers_to_transform")
        listed = [] if layers is None else layers if isinstance(layers, list) else [layers]
        if not all(type(layer) is int and layer >= 0 for layer in listed):
            raise fields.error("layers_to_transform", "want an index of a layer, or a list of them")
        included = _names(content, fields, "target_modules")
        if listed and isinstance(included, Expression):
            raise fields.error(
                "layers_to_transform", "want null if target_modules is an expression"
            )
        return cls(
            included,
            _names(content, fields, "exclude_modules"),
            tuple(listed),
            _layer_lists(content, fields),
            fields.flag("ensure_weight_tying", False),
        )

    @property
    def expressions(self) -> list[Expression]:
        """All expressions."""
        named = [one for one in (self.included, self.excluded) if isinstance(one, Expression)]
        return [*named, *self.layer_lists]

    def has(self, module: str) -> bool:
        """Whether a module, such as "model.layers.0.mlp.up_proj", is targeted."""
        names = {module}
        if self.tied and module.rpartition(".")[2] in NOT_LINEAR:
            names |= set(EMBEDDINGS)
        return any(map(self._has, names))

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
        found = (pattern.first_group(module) for pattern in self.layer_lists)
        first = next((group for group in found if group is not None), "")
        return int(first) if first.isdecimal() else None


def _matches(names: Expression | tuple[str, ...], module: str) -> bool:
    if isinstance(names, Expression):
        return names.matches(module)
    return any(module == name or module.endswith(f".{name}") for name in names)


def _names(content: Mapping[str, Any], fields: Fields, key: str) -> _Names:
    """Return a list of names, or an expression."""
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    if not isinstance(value, str):
        raise fields.error(key, "want a list of names, or an expression")
    if key == "target_modules" and value.lower() == ALL_LINEAR:
        return Expression(rf"(?!(?:.*\.)?(?:{'|'.join(NOT_LINEAR)})$).*", full=True, trusted=True)
    return _expression(value, fields, key, full=True)


def _layer_lists(content: Mapping[str, Any], fields: Fields) -> tuple[Expression, ...]:
    """Return the expressions of layers_pattern, of which there may be one or a list."""
    key = "layers_pattern"
    value = content.get(key) or []
    names = [value] if isinstance(value, str) else value
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise fields.error(key, "want a list of names, or an expression")
    if not names:
        return (Expression("[^.]*", _BEFORE, _BEHIND, trusted=True),)
    return tuple(_expression(name, fields, key, _BEFORE, _BEHIND) for name in names)


def _expression(
    text: str, fields: Fields, key: str, prefix: str = "", suffix: str = "", *, full: bool = False
) -> Expression:
    try:
        return Expression(text, prefix, suffix, full=full)
    except ValueError as error:
        raise fields.error(key, f"which is not an expression: {error}") from error
