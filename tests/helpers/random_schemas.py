"""Random JSON Schemas of the kinds that tools and answers have, with bounds on every value."""

from __future__ import annotations

from typing import Any

WORDS = ["red", "green", "10", "null", "a b", "", 'q"q', "x\\y", "line\nbreak", "ü", "</a>"]
PATTERNS = ["^[a-c]{1,3}$", "^(x|yz)-[0-9]{2}$", "a/b", "^\\\\w{2,4}$", "[0-9]$", "^\\d+\\.\\d$"]
_NAMES = ["city", "days", "kind_of", "x", "values", "note", "flag2"]


def random_schema(rng: Any, depth: int = 2) -> dict[str, Any]:
    """Return the schema of some value; ``depth`` bounds its nesting."""
    made = rng.choice([*_SCALARS, _union, _array, object_schema, _shared][: None if depth else 7])
    return made(rng) if made in _SCALARS else made(rng, depth - 1)


def tool_schema(rng: Any) -> dict[str, Any]:
    """Return the schema of a function's arguments."""
    shared = {"Shared": random_schema(rng, 0)}
    return {**object_schema(rng, 2), "$defs": shared}


def bounded(schema: Any) -> Any:
    """Return a schema with a bound on every text and number, and without unknown properties."""
    if isinstance(schema, list):
        return [bounded(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: bounded(value) for key, value in schema.items()}
    if made.get("type") == "object":
        made["additionalProperties"] = False
    elif made.get("type") == "number":  # its digits have no bound
        made = {"enum": [-0.5, 0, 2.25]}
    elif made.get("type") == "string" and "enum" not in made:
        made.setdefault("maxLength", 12)
    return made


def object_schema(rng: Any, depth: int) -> dict[str, Any]:
    """Return the schema of an object."""
    names = rng.sample(_NAMES, rng.randrange(4))
    properties = {name: random_schema(rng, depth) for name in names}
    made = {"type": "object", "properties": properties, "title": "A title"}
    if rng.random() < 0.8:
        made["required"] = [name for name in names if rng.random() < 0.6]
    if rng.random() < 0.7:
        made["additionalProperties"] = False
    return made


def _text(rng: Any) -> dict[str, Any]:
    bounds = {"minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
    return {"type": "string", **rng.choice([{}, bounds, {"maxLength": 4}])}


def _pattern(rng: Any) -> dict[str, Any]:
    return {"type": "string", "pattern": rng.choice(PATTERNS)}


def _enum(rng: Any) -> dict[str, Any]:
    values = rng.sample(WORDS, rng.randrange(1, 4))
    others = rng.choice([[], [], [3, None], [True]])
    return {"enum": values + others} if others else {"type": "string", "enum": values}


def _integer(rng: Any) -> dict[str, Any]:
    least = rng.randrange(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(200)}


def _number(rng: Any) -> dict[str, Any]:
    return {"type": "number", "minimum": rng.choice([-1.5, 0]), "exclusiveMaximum": 3}


def _boolean(rng: Any) -> dict[str, Any]:
    return rng.choice([{"type": "boolean"}, {"const": rng.choice([7, "seven", None])}])


def _null(rng: Any) -> dict[str, Any]:
    return rng.choice([{"type": "null"}, {"type": ["string", "null"], "maxLength": 3}])


_SCALARS = [_text, _pattern, _enum, _integer, _number, _boolean, _null]


def _union(rng: Any, depth: int) -> dict[str, Any]:
    parts = [random_schema(rng, depth if depth > 0 else 0) for _ in range(2)]
    return {"anyOf": parts, "description": "One of two."}


def _array(rng: Any, depth: int) -> dict[str, Any]:
    bounds = {"minItems": rng.randrange(2), "maxItems": rng.randrange(2, 4)}
    return {"type": "array", "items": random_schema(rng, max(depth, 0)), **bounds}


def _shared(rng: Any, depth: int) -> dict[str, Any]:
    """Return a reference; the schema of the arguments has what it points to."""
    return {"$ref": "#/$defs/Shared"}
