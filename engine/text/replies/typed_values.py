"""Turn the raw text of an argument into JSON, by the type that the tool's schema gives it."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ANY = frozenset(("null", "boolean", "integer", "number", "array", "object"))
_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    str: "string",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
}
# A backslash: with what it escapes, or alone before what it does not.
_BACKSLASH = re.compile(r"""(\\[\\\n\r'"abfnrtvxuUN0-7])|\\(?=.)""", re.DOTALL)
_RAW_STRING = re.compile(r"[rR][bB]?['\"]")
_MAX_LITERAL = 2**16  # characters; Python's own reader of literals is slow and recursive


def to_json(value: object) -> str:
    """Return a value as JSON text, which can be encoded in UTF-8. Raises ValueError."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half of a character: only its escape can be sent
        text = json.dumps(value, allow_nan=False)
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return text


def types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that a parameter may have; empty if the schema does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_types(schema, found, set()))


def _types(root: Mapping[str, Any], schema: Any, seen: set[int]) -> Iterator[str]:
    """Yield the types of a schema; those in ``seen``, by their identity, were looked at."""
    if not isinstance(schema, Mapping) or id(schema) in seen:
        return
    seen.add(id(schema))
    given = schema.get("type")
    yield from [given] if isinstance(given, str) else _strings(given)
    for choice in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(choice) or ():
            yield from _types(root, part, seen)
    if given is None:
        for value in schema.get("enum") or ([schema["const"]] if "const" in schema else ()):
            yield _TYPES.get(type(value), "")
    yield from _types(root, referred(root, schema.get("$ref")), seen)


def _strings(given: object) -> list[str]:
    return [one for one in given if isinstance(one, str)] if isinstance(given, list) else []


def referred(root: Mapping[str, Any], reference: object) -> Any:
    """Return what a reference inside a schema points to, else None."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for name in reference[2:].split("/"):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def typed(raw: str, types: frozenset[str]) -> str:
    """Return the JSON text of an argument that was written as ``raw``.

    A value that fits one of the types keeps it. What fits none, and what has no type in the schema,
    is a string: the function can still judge it.
    """
    wanted = types & _ANY
    for reader in (_read_json, _read_python):
        try:
            value = reader(raw.strip()) if wanted else raw
            kind = _TYPES.get(type(value), "")
            if kind == "number" and "integer" in wanted and value == int(value):
                return to_json(int(value))
            if kind in wanted or (kind == "integer" and "number" in wanted):
                return to_json(value)
        except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError):
            continue
    return to_json(raw)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def finite(value: float) -> float:
    """Return a number, or the largest one in place of an infinite one: JSON has none."""
    return max(-sys.float_info.max, min(sys.float_info.max, value))


_read_json: Callable[[str], Any] = json.JSONDecoder(
    parse_constant=_refuse, parse_float=lambda text: finite(float(text))
).decode


def _read_python(text: str) -> Any:
    """Read a Python literal, which some models write for objects and booleans."""
    if len(text) > _MAX_LITERAL:
        raise ValueError("too long")
    return ast.literal_eval(parse_expression(text))


def parse_expression(text: str) -> ast.expr:
    r"""Parse a Python expression without evaluating it.

    A backslash that begins no escape stands for itself, as Python has it; it is doubled first,
    because Python warns of it. Raises SyntaxError, ValueError, RecursionError or MemoryError.
    """
    if not _RAW_STRING.search(text):
        text = _BACKSLASH.sub(lambda found: found[1] or r"\\", text)
    return ast.parse(text, mode="eval").body
