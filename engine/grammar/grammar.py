"""A grammar as llguidance reads it, and how one is made of a request's structured outputs.

It consists of named parts, each in Lark or a JSON Schema. The first one describes the whole output
and refers to the others as ``@name``. Source: llguidance, docs/syntax.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kiln.engine.errors import RequestError, field_error
from kiln.engine.requests.structured_outputs import FIELD, StructuredOutputsParams

MAX_SCHEMA = 2**20  # characters of a JSON Schema
MAX_REGEX = 2**15
MAX_GRAMMAR = 2**17  # of Lark or GBNF, and of all choices together
MAX_DEPTH = 100  # of objects and lists in a schema; llguidance reads 128
# Between two parts of JSON: up to two spaces, or a line break and its indentation. It is bounded,
# because some models never stop writing white space where they may.
WHITESPACE = r"(\x20{1,2}|\r?\n[\x20\t]{0,32})"

_ASCII = "dw"  # \d and \w of a regular expression, as in JSON Schema and in vLLM

Schema = Mapping[str, Any] | bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """Named parts: ``lark`` texts and ``schemas``; ``start`` is the name of the first.

    ``text`` is the form that the engine gets.
    """

    start: str
    lark: Mapping[str, str]
    schemas: Mapping[str, Schema]

    @classmethod
    def of_lark(cls, text: str) -> Grammar:
        """Return the grammar of a Lark text."""
        return cls("start", {"start": text}, {})

    @classmethod
    def of_schema(cls, schema: Schema) -> Grammar:
        """Return the grammar of a JSON Schema."""
        return cls("start", {}, {"start": schema})

    def inside(self, lark: str, name: str = "body") -> Grammar:
        """Return the grammar of a Lark text that refers to this grammar as ``@name``."""

        def renamed(parts: Mapping[str, Any]) -> dict[str, Any]:
            return {name if key == self.start else key: part for key, part in parts.items()}

        return Grammar("outer", {"outer": lark, **renamed(self.lark)}, renamed(self.schemas))

    @property
    def text(self) -> str:
        """The grammar in JSON, as llguidance reads it."""
        parts: dict[str, dict[str, Any]] = {
            **{name: {"lark_grammar": text} for name, text in self.lark.items()},
            **{name: {"json_schema": with_options(one)} for name, one in self.schemas.items()},
        }
        parts = {name: {"name": name, **part} for name, part in parts.items()}
        return json.dumps({"grammars": [parts.pop(self.start), *parts.values()]})


def with_options(schema: Schema, whitespace: str | None = WHITESPACE) -> dict[str, Any]:
    """Return a JSON Schema with llguidance's options: which white space, and oneOf as anyOf.

    ``whitespace`` is a regular expression; None: there is none.
    """
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    if "x-guidance" in schema:  # ours already
        return dict(schema)
    options: dict[str, Any] = {"coerce_one_of": True, "whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    return {**schema, "x-guidance": options}


def grammar_of(params: StructuredOutputsParams) -> Grammar:
    """Return the grammar of a request's structured outputs.

    It is not compiled yet. Raises RequestError for one that is too large, that is not JSON, and for
    GBNF that cannot be read.
    """
    if params.regex is not None:
        return _of_regex(params.regex)
    if params.choice is not None:
        return _of_choice(params.choice)
    if params.grammar is not None:
        return _of_grammar(params.grammar)
    schema = {"type": "object"} if params.json is None else read_schema(params.json)
    if params.disable_additional_properties:
        schema = _closed(schema)
    whitespace = None if params.disable_any_whitespace else params.whitespace_pattern or WHITESPACE
    return Grammar.of_schema(with_options(schema, whitespace))


def read_schema(given: str | Schema, where: str = f"{FIELD}.json") -> Schema:
    """Return a JSON Schema, which may be given as text. Raises RequestError."""
    try:
        text = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
        _check_size(text, MAX_SCHEMA, where)
        schema = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise field_error(where, f"is not JSON: {str(error)[:160]}") from error
    if not isinstance(schema, dict | bool):
        raise field_error(where, f"must be a JSON Schema, an object, got {repr(schema)[:80]}")
    if _depth(schema) > MAX_DEPTH:
        raise field_error(where, f"has more than {MAX_DEPTH} levels")
    if isinstance(schema, dict):
        schema.pop("x-guidance", None)  # options of the compiler are not the client's
    return schema


def _of_regex(pattern: str) -> Grammar:
    _check_size(pattern, MAX_REGEX, f"{FIELD}.regex")
    from llguidance import regex_to_lark  # imported where it is used: most requests do without

    return Grammar.of_lark(f"start: /{regex_to_lark(pattern, _ASCII)}/")


def _of_choice(texts: Sequence[str]) -> Grammar:
    where = f"{FIELD}.choice"
    if len(set(texts)) < len(texts):
        texts = list(dict.fromkeys(texts))
    literals = " | ".join(map(literal, texts))
    _check_size(literals, MAX_GRAMMAR, where)
    return Grammar.of_lark(f"start: {literals}")


def _of_grammar(text: str) -> Grammar:
    where = f"{FIELD}.grammar"
    _check_size(text, MAX_GRAMMAR, where)
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return Grammar.of_lark(any_to_lark(text))
    except Exception as error:  # of its own kinds, and of recursion
        raise field_error(where, f"cannot be read as GBNF: {str(error)[:160]}") from error


def literal(text: str) -> str:
    """Return a text as a literal of Lark. Raises RequestError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{FIELD}: {text[:80]!r} has half of a surrogate pair", FIELD) from error
    return json.dumps(text, ensure_ascii=False)


def _check_size(text: str, most: int, where: str) -> None:
    if len(text) > most:
        raise field_error(where, f"has {len(text)} characters: at most {most} are accepted")


def _depth(schema: Any) -> int:
    depth, level = 0, [schema]
    while level := [one for one in level if isinstance(one, dict | list) and one]:
        level = [x for one in level for x in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have no properties that it does not list, unless it says so."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) or schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
