"""What an output must look like: the parameters of structured outputs, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kiln.engine.errors import RequestError, field_error

FIELD = "structured_outputs"
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_TEXTS = ("regex", "grammar", "structural_tag", "whitespace_pattern")
_FLAGS = ("json_object", "disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """One of: a JSON Schema, a regular expression, texts to choose from, a grammar, any object.

    ``json`` is a schema, as an object or as text; ``grammar`` is in GBNF or in Lark, told apart by
    its text. ``disable_any_whitespace`` allows none between the parts of JSON,
    ``whitespace_pattern`` is a regular expression of what is allowed there, and
    ``disable_additional_properties`` forbids what a schema does not list, where it does not say.
    Raises RequestError if not exactly one kind is given, or a value has another type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: str | None = None

    def __post_init__(self) -> None:
        """Check the types, and that exactly one kind is given."""
        for name in _TEXTS:
            self._check(name, isinstance(getattr(self, name), str | None), "a text")
        for name in _FLAGS:
            self._check(name, isinstance(getattr(self, name), bool | None), "true or false")
        self._check("json", isinstance(self.json, str | Mapping | bool | None), "a JSON Schema")
        if self.choice is not None:
            texts = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            texts = texts and all(isinstance(one, str) for one in self.choice)
            self._check("choice", texts and len(self.choice) > 0, "a list of texts, not empty")
        self._check("structural_tag", self.structural_tag is None, "absent: it is not supported")
        given = [name for name in _KINDS if self._value(name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise field_error(FIELD, f"must have exactly one of {', '.join(_KINDS)}; has {found}")

    @classmethod
    def of(cls, given: object) -> StructuredOutputsParams:
        """Return the parameters of an object of that class, of vLLM's, or of a dict.

        Raises RequestError for an unknown name and for another type.
        """
        if isinstance(given, cls):
            return given
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping):  # vLLM's own class has more names, for its own use
            if not hasattr(given, "json_object"):
                raise field_error(FIELD, f"must be StructuredOutputsParams, got {repr(given)[:80]}")
            given = {name: getattr(given, name, None) for name in names}
        unknown = sorted(map(str, given.keys() - names))
        if unknown:
            raise field_error(FIELD, f"has no field {unknown[0][:80]!r}: it has {', '.join(names)}")
        return cls(**{name: value for name, value in given.items() if value is not None})

    def _value(self, name: str) -> object:
        value = getattr(self, name)
        return None if name == "json_object" and not value else value

    def _check(self, name: str, valid: bool, wanted: str) -> None:
        if not valid:
            shown = repr(getattr(self, name))[:80]
            raise RequestError(f"{FIELD}.{name}: must be {wanted}, got {shown}", f"{FIELD}.{name}")
