"""Typed reading of config.json: every error names the file, the field and its value."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kiln.engine.errors import ModelError

OVERRIDES = "--hf-overrides"  # stands for the file in errors about what it says
_REQUIRED = object()


class Fields:
    """The fields of one JSON object. As in transformers, ``null`` means absent.

    ``names``: what a field is called here, where that differs from its usual name. ``overrides``:
    those of the values that the user gave in the place of the file's.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: Path,
        prefix: str = "",
        names: Mapping[str, str] = MappingProxyType({}),
        overrides: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._values = values
        self._path = path
        self._prefix = prefix
        self._names = names
        self._overrides = overrides

    def __contains__(self, name: str) -> bool:
        return self.value(name) is not None

    def switched_on(self) -> list[str]:
        """Return the names of the fields that are not null, false, zero or empty.

        Names that begin with an underscore are left out: transformers keeps notes of its own in
        them, which never change what a model computes.
        """
        return [name for name, value in self._values.items() if value and name[:1] != "_"]

    def names(self) -> list[str]:
        """Return the names of the fields that are not null, in their order."""
        return [name for name, value in self._values.items() if value is not None]

    def error(self, name: str, problem: str) -> ModelError:
        """Return a ModelError about one field."""
        value, name = repr(self.value(name))[:80], self._names.get(name, name)
        return ModelError(f"{self._source(name)}: {self._prefix}{name} is {value}, {problem}")

    def _source(self, name: str) -> Path | str:
        """Return where a field comes from, by its name there."""
        return OVERRIDES if name in self._overrides else self._path

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """Return a string. Raises ModelError."""
        return self._typed(name, str, "want a string", default)  # type: ignore[no-any-return]

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """Return a boolean. Raises ModelError."""
        return self._typed(name, bool, "want true or false", default)  # type: ignore[no-any-return]

    def count(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """Return an integer of at least ``least``. Raises ModelError."""
        value = self._typed(name, int, "want an integer", default)
        if isinstance(value, bool) or value < least:
            raise self.error(name, f"want an integer of {least} or more")
        return value  # type: ignore[no-any-return]

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a finite number above 0. Raises ModelError."""
        value = self._typed(name, (int, float), "want a number", default)
        if isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.error(name, "want a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """Return a finite number above 0, or None if absent. Raises ModelError."""
        return self.number(name) if name in self else None

    def optional_count(self, name: str) -> int | None:
        """Return an integer of at least 1, or None if absent. Raises ModelError."""
        return self.count(name) if name in self else None

    def texts(self, name: str) -> list[str]:
        """Return a list of strings, empty if absent. Raises ModelError."""
        value = self._typed(name, list, "want a list of strings", [])
        if not all(isinstance(item, str) for item in value):
            raise self.error(name, "want a list of strings")
        return value  # type: ignore[no-any-return]

    def nested_texts(self, name: str) -> list[str]:
        """Return all strings of a list of strings or of lists of them. Raises ModelError."""
        value = self._typed(name, list, "want a list of strings", [])
        found = [item for own in value for item in (own if isinstance(own, list) else [own])]
        if not all(isinstance(item, str) for item in found):
            raise self.error(name, "want a list of strings, or of lists of strings")
        return found

    def counts(self, name: str) -> list[int]:
        """Return a list of integers of 0 or more, empty if absent. Raises ModelError."""
        value = self._typed(name, list, "want a list of integers", [])
        if not all(type(item) is int and item >= 0 for item in value):
            raise self.error(name, "want a list of integers of 0 or more")
        return value  # type: ignore[no-any-return]

    def numbers(self, name: str) -> list[float]:
        """Return a list of finite numbers above 0, empty if absent. Raises ModelError."""
        value = self._typed(name, list, "want a list of numbers", [])
        for item in value:
            if type(item) not in (int, float) or not 0 < item < float("inf"):
                shown = repr(item)[:80]
                raise self.error(name, f"want a list of numbers above 0, but it has {shown}")
        return [float(item) for item in value]

    def group(self, name: str) -> Fields | None:
        """Return the fields of a nested object, or None if absent or empty."""
        value = self._typed(name, dict, "want an object", {})
        return self.standing_for(name, value) if value else None

    @property
    def place(self) -> str:
        """The file, and the object in it, for errors."""
        return f"{self._path}: {self._prefix}".rstrip(".: ")

    def value(self, name: str) -> Any:
        """Return a field of any type as it is, None if absent."""
        return self._values.get(self._names.get(name, name))

    def standing_for(self, name: str, values: Mapping[str, Any]) -> Fields:
        """Return other values in the place of a field, such as what a name of them means."""
        inner = self._overrides.get(name)
        given = inner if isinstance(inner, Mapping) else {}
        return Fields(values, self._path, f"{self._prefix}{name}.", overrides=given)

    def replaced(self, name: str, value: Any) -> Fields:
        """Return the fields with another value in one of them, for what reads them next."""
        return Fields({**self._values, name: value}, self._path, self._prefix, self._names)

    def _typed(self, name: str, kind: Any, wanted: str, default: Any) -> Any:
        value = self.value(name)
        if value is None:
            if default is _REQUIRED:
                name = self._names.get(name, name)
                where = self._source(name)
                raise ModelError(f"{where}: {self._prefix}{name} is missing, {wanted}")
            return default
        if not isinstance(value, kind):
            raise self.error(name, wanted)
        return value
