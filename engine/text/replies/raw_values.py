"""The grammar of arguments whose values are raw text between tags: strings bare, others in JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator

from kiln.engine.grammar.grammar import literal
from kiln.engine.text.replies.calls import Function, either
from kiln.engine.text.replies.lark import ANY, Lark
from kiln.engine.text.replies.parameters import (
    ANNOTATIONS,
    Parameter,
    alternatives,
    parameters_of,
)
from kiln.engine.text.replies.typed_values import to_json, typed, types_of

# Texts that may be read as something else than a string, where other types are allowed too.
_NO_STRING = r"/[\s\x1c-\x1f\ufeff]*([-+.~(\[{0-9\\]|null|None|true|True|false|False)(?s:.*)/"
_OF_STRINGS = ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength"}
_OF_OTHERS = frozenset(
    (
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("minProperties", "maxProperties", "propertyNames"),
        *("format", "contentEncoding", "contentMediaType"),  # of strings, but no assertions
    )
)


class RawValues:
    """Writes the parameters of a function as expressions of Lark.

    ``ends`` are the texts behind a value, and ``banned`` tags that no string may contain. What ends
    a string is a part of its terminal, as far as it is text: a lexeme of any text would read on.
    """

    def __init__(self, lark: Lark, ends: tuple[str, ...], banned: tuple[str, ...]) -> None:
        self._lark = lark
        self._end, self._rest = lark.split(*ends)
        self._banned = f"({ANY} ({' | '.join(map(literal, banned))}) {ANY})"

    def arguments(self, function: Function, tag: Callable[[str], str], any_tag: str) -> str:
        """Return all arguments of a call.

        ``tag`` gives what comes before the value of a parameter, ``any_tag`` is that of any. Raises
        RequestError for a schema that cannot be written in this form.
        """
        parameters = parameters_of(function)
        if parameters is None:
            return f"({any_tag} {self._string({}, others=False)})*"
        written = []
        for one in parameters:
            value = f"{tag(one.name)} {self._value(function, one)}"
            written.append(value if one.required else f"({value})?")
        return " ".join(written)

    def _value(self, function: Function, parameter: Parameter) -> str:
        """Return a value with what ends it."""
        kinds = types_of(parameter.root, parameter.name)
        parts = list(alternatives(parameter.root, parameter.schema))
        raw, rest = [], []
        for part in parts if "string" in kinds or not kinds else ():
            strings, other = _split(part)
            raw += [] if strings is None else [strings]
            rest += [] if other is None else [other]
        if kinds and "string" not in kinds:
            rest = [parameter.schema]
        others = bool(kinds - {"string"})
        forms = [self._strings(function, parameter, one, kinds, others=others) for one in raw]
        if rest:
            schema = parameter.alone(rest[0] if len(rest) == 1 else {"anyOf": rest})
            end = literal(self._end) if self._end else ""
            forms.append(f"{self._lark.schema(schema)} {end} {self._rest}")
        return either(*forms)

    def _strings(
        self,
        function: Function,
        parameter: Parameter,
        schema: dict[str, Any],
        kinds: frozenset[str],
        *,
        others: bool,
    ) -> str:
        unknown = sorted(schema.keys() - _OF_STRINGS - _OF_OTHERS)
        if unknown:
            raise function.refused(f"has {unknown[0][:80]!r} in {parameter.name[:80]!r}")
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if values is None:
            try:
                return self._string(schema, others=others)
            except ValueError as error:
                raise function.refused(f"{error} in {parameter.name[:80]!r}") from error
        rules = Draft202012Validator({key: schema[key] for key in schema.keys() & _OF_STRINGS})
        fitting = [value for value in values if isinstance(value, str) and rules.is_valid(value)]
        wrong = [value for value in fitting if typed(value, kinds) != to_json(value)]
        if wrong or not fitting:
            raise function.refused(f"has the enum {repr(values)[:80]} in {parameter.name[:80]!r}")
        texts = [f"{value}{self._end}" for value in fitting]
        return f"{either(*(literal(text) if text else '' for text in texts))} {self._rest}"

    def _string(self, schema: dict[str, Any], *, others: bool) -> str:
        """Return a string with what ends it, as one terminal. Raises ValueError for a pattern."""
        parts = [_length(schema), f"~{self._banned}"]
        if "pattern" in schema:
            parts.append(_pattern(schema["pattern"]))
        if others:
            parts.append(f"~{_NO_STRING}")
        end = literal(self._end) if self._end else ""
        text = self._lark.terminal(f"({' & '.join(parts)}) {end}")
        return f"{text} {self._rest}"


def _split(schema: dict[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return what a schema without a union says of strings, and of anything else."""
    kind = schema.get("type")
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if kind == "string" or (kind is None and values is None):
        return schema, None
    if kind is not None:
        return None, schema
    strings = [value for value in values or () if isinstance(value, str)]
    others = [value for value in values or () if not isinstance(value, str)]
    rest = {key: value for key, value in schema.items() if key not in ("enum", "const")}
    return (
        {**rest, "enum": strings} if strings else None,
        {**rest, "enum": others} if others else None,
    )


def _length(schema: dict[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not least and most is None:
        return ANY
    return f"/(?s:.){{{int(least)},{'' if most is None else int(most)}}}/"


def _pattern(pattern: str) -> str:
    """Return the texts in which a pattern is found. Raises ValueError."""
    from llguidance import regex_to_lark  # imported where it is used: most requests do without

    begins, body = pattern.startswith("^"), pattern.removeprefix("^")
    slashes = len(body[:-1]) - len(body[:-1].rstrip("\\"))
    ends = body.endswith("$") and slashes % 2 == 0
    body = body[:-1] if ends else body
    if (begins or ends) and _has_alternatives(body):
        raise ValueError(f"has the pattern {pattern[:80]!r}, an anchor beside alternatives,")
    regex = regex_to_lark(f"(?:{body})", "dw")
    return f"({'' if begins else ANY} /{regex}/ {'' if ends else ANY})"


def _has_alternatives(pattern: str) -> bool:
    """Whether a pattern has alternatives outside of groups."""
    plain = re.sub(r"\\.|\[[^\]]*\]", "", pattern)
    while (inner := re.sub(r"\([^()]*\)", "", plain)) != plain:
        plain = inner
    return "|" in plain
