"""Check the tools of a chat: their names, and that their parameters are JSON Schemas.

A template prints a tool as JSON, and the parser of calls reads the types of its parameters: a
wrong schema would fail late, or not at all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

from kiln.engine.errors import field_error

MAX_TOOLS = 1024
MAX_NAME = 64  # characters, OpenAI's limit
# Bounds on all schemas of a chat together, with which a check takes less than half a second.
MAX_OBJECTS = 8192  # objects and lists
MAX_VALUES = 65_536  # entries of objects and lists
MAX_CHARACTERS = 2**18
MAX_DEPTH = 40
_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_MAX_KEPT = 8192  # characters of a schema that is remembered as checked
_MAX_SHOWN = 160  # characters of what is wrong


def read_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return the tools as templates print them, None if there are none.

    Raises RequestError naming the wrong field, such as ``tools[0].function.parameters``.
    """
    if tools is not None and (not isinstance(tools, Sequence) or isinstance(tools, str)):
        raise field_error("tools", "must be a list of tools")
    if not tools:
        return None
    if len(tools) > MAX_TOOLS:
        raise field_error("tools", f"{len(tools)} tools: at most {MAX_TOOLS}")
    size = _Size()
    return [_read(tool, f"tools[{index}]", size) for index, tool in enumerate(tools)]


def _read(tool: object, where: str, size: _Size) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise field_error(f"{where}.type", f"must be 'function', got {repr(kind)[:80]}")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise field_error(f"{where}.function", "must be an object with a name")
    where = f"{where}.function"
    name = function.get("name")
    if not isinstance(name, str) or len(name) > MAX_NAME or not _NAME.fullmatch(name):
        wanted = f"must be 1 to {MAX_NAME} letters, digits, dots, dashes or underscores"
        raise field_error(f"{where}.name", f"{wanted}, got {repr(name)[:80]}")
    if function.get("strict"):
        message = "is not supported by LLM.chat, which reads no calls: leave it out, or send false"
        raise field_error(f"{where}.strict", message)
    parameters = function.get("parameters")
    if parameters is not None:
        _check_schema(parameters, f"{where}.parameters", size)
    kept = {k: v for k, v in function.items() if v is not None and k != "strict"}
    rest = {k: v for k, v in tool.items() if v is not None and k != "cache_control"}
    return {"type": "function", **rest, "function": kept}


class _Size:
    """Counts the values of schemas, and refuses those that take too long to check."""

    def __init__(self) -> None:
        self._objects = self._values = self._characters = 0

    def add(self, schema: object, where: str) -> None:
        """Count a schema. Raises RequestError at the first bound that is exceeded."""
        level: list[object] = [schema]
        depth = 0
        while level:
            inner = [entry for value in level for entry in _entries(value)]
            depth += 1
            self._objects += sum(isinstance(value, Mapping | list) for value in level)
            self._values += len(inner)
            self._characters += sum(len(value) for value in level if isinstance(value, str))
            for found, most, what in (
                (depth, MAX_DEPTH, "levels"),
                (self._objects, MAX_OBJECTS, "objects and lists"),
                (self._values, MAX_VALUES, "values"),
                (self._characters, MAX_CHARACTERS, "characters"),
            ):
                if found > most:
                    raise field_error(
                        where, f"the schemas of the tools have more than {most} {what}"
                    )
            level = inner


def _entries(value: object) -> Iterator[object]:
    """Yield the keys and values of an object, or the entries of a list."""
    if isinstance(value, Mapping):
        yield from value.keys()
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _check_schema(schema: object, where: str, size: _Size) -> None:
    if not isinstance(schema, Mapping):
        raise field_error(where, f"must be a JSON Schema, an object, got {repr(schema)[:80]}")
    size.add(schema, where)
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise field_error(where, f"is not JSON: {error}") from error
    # Agents send the same tools with every request, so the result is remembered.
    find = _first_error if len(text) <= _MAX_KEPT else _first_error.__wrapped__
    if found := find(text):
        raise field_error(where, f"is not a JSON Schema: {found}")


@lru_cache(maxsize=1024)
def _first_error(text: str) -> str | None:
    """Return what is wrong with a schema, given as JSON; None if nothing is."""
    error = next(_schemas().iter_errors(json.loads(text)), None)
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))[:_MAX_SHOWN]
    said = error.message if len(error.message) <= _MAX_SHOWN else f"{error.message[:159]}…"
    return f"at {place}: {said}" if place else str(said)


@cache
def _schemas() -> Any:
    """Return what checks schemas: those of draft 7, with the keywords of 4 and of 2020-12.

    The later drafts' own description of schemas is split over several documents, which takes five
    times as long. Alternatives are told apart by their types, so that the first error is the one
    to report.
    """
    from jsonschema import Draft7Validator  # takes 0.1 s

    schema, count = {"$ref": "#"}, {"type": "integer", "minimum": 0}
    schemas = {"type": "object", "additionalProperties": schema}
    texts = {"type": "array", "items": {"type": "string"}}
    bound = {"type": ["number", "boolean"]}
    listed = {"type": "array", "minItems": 1, "items": schema}
    described = Draft7Validator.META_SCHEMA
    kinds = described["definitions"]["simpleTypes"]
    properties = {
        **described["properties"],
        "type": _either({"type": "array", "maxItems": 7, "items": kinds}, kinds),
        "items": _either(listed, schema),
        "dependencies": {"type": "object", "additionalProperties": _either(texts, schema)},
        **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), bound),
        **dict.fromkeys(("$defs", "dependentSchemas"), schemas),
        **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "contentSchema"), schema),
        **dict.fromkeys(("minContains", "maxContains"), count),
        "prefixItems": listed,
        "dependentRequired": {"type": "object", "additionalProperties": texts},
    }
    return Draft7Validator({**described, "properties": properties})


def _either(of_a_list: dict[str, Any], of_others: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"type": "array"}, "then": of_a_list, "else": of_others}
