"""The schema of a function's arguments as named parameters, each of which is written on its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kiln.engine.text.replies.calls import Function
from kiln.engine.text.replies.typed_values import referred

# Keywords that say nothing about values.
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$schema", "$id", "$comment", "$defs", "definitions"),
    )
)
_OF_OBJECTS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
_MAX_REFERENCES = 8  # a schema may refer to itself


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter. ``root`` is the schema that references in ``schema`` point into."""

    name: str
    schema: Any
    required: bool
    root: Mapping[str, Any]

    def alone(self, schema: Any) -> Any:
        """Return a part of the schema as one of its own."""
        if not isinstance(schema, Mapping):
            return schema
        shared = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
        return {**schema, **shared}


def parameters_of(function: Function) -> list[Parameter] | None:
    """Return the parameters of a function in the order of its schema; None: any at all.

    Raises RequestError for a schema that says more than which parameters there are.
    """
    if not function.strict:
        return None
    root = function.schema
    schema = resolved(root, root)
    unknown = sorted(schema.keys() - _OF_OBJECTS)
    if unknown:
        raise function.refused(f"has {unknown[0][:80]!r} beside its properties")
    properties, others = schema.get("properties") or {}, schema.get("additionalProperties", True)
    required = schema.get("required") or []
    if not properties and not required and others is True:
        return None
    undeclared = [name for name in required if name not in properties]
    if undeclared and others is not True:
        raise function.refused(f"requires {undeclared[0][:80]!r}, which is not in its properties")
    whole = {**properties, **dict.fromkeys(undeclared, True)}
    return [Parameter(name, one, name in required, root) for name, one in whole.items()]


def resolved(root: Mapping[str, Any], schema: Any) -> dict[str, Any]:
    """Return a schema with what it refers to in its place; other keywords stay beside it.

    A reference stays if it leads to no schema here, or to one that says something else by the same
    keyword.
    """
    found = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(_MAX_REFERENCES):
        parts = found.get("allOf")
        key = "allOf" if isinstance(parts, list) and len(parts) == 1 else "$ref"
        target = parts[0] if key == "allOf" and parts else referred(root, found.get("$ref"))
        rest = {name: value for name, value in found.items() if name != key}
        if not isinstance(target, Mapping):
            break
        both = target.keys() & rest.keys() - ANNOTATIONS
        if any(target[name] != rest[name] for name in both):
            break
        found = {**target, **rest}
    return found


def alternatives(
    root: Mapping[str, Any], schema: Any, seen: set[int] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the schemas that a schema allows one of, without a union at their top.

    Unions in ``seen``, by their identity, were looked at: a schema may refer to itself.
    """
    one, seen = resolved(root, schema), set() if seen is None else seen
    for union in ("anyOf", "oneOf"):
        if union in one and not one.keys() - ANNOTATIONS - {union}:
            if id(one[union]) not in seen:
                seen.add(id(one[union]))
                for part in one[union]:
                    yield from alternatives(root, part, seen)
            return
    kinds = one.get("type")
    if isinstance(kinds, list):
        yield from ({**one, "type": kind} for kind in kinds)
    else:
        yield one
