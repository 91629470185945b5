"""Random forms of outputs, each with a judge of texts: schemas, expressions, choices, grammars.

The length of every output is bounded, so that a model with random weights finishes.
"""

from __future__ import annotations

import json
import re

import jsonschema

LETTERS = "abcdefgh"
TEXTS = [
    "",
    "a",
    "ja",
    'say "x"',
    "back\\slash",
    "zwei\nzeilen",
    "ü",
    "日本",
    "😀",
    "x" * 30,
    "a b",
    "ab",
]


def random_schema(chance, depth=2):
    """Return a schema whose root is an object."""
    schema = _object(chance, depth)
    if chance.random() < 0.5:
        schema["$defs"] = {"part": _value(chance, 0)}
        schema["properties"]["ref"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema["required"], "ref"]
    return schema


def _object(chance, depth):
    names = chance.sample(["a", "b", "name", "x y", "ü", "back\\slash"], chance.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(chance, depth - 1) for name in names},
        "required": [name for name in names if chance.random() < 0.7],
        "additionalProperties": False,
    }


def _value(chance, depth):
    kinds = [
        lambda: {"type": "string", "maxLength": chance.randint(0, 8)},
        lambda: {"type": "string", "pattern": "^" + _expression(chance, 1, _as_regex) + "$"},
        lambda: {
            "type": "integer",
            "minimum": chance.randint(-50, 0),
            "maximum": chance.randint(1, 999),
        },
        lambda: {"type": "boolean"},
        lambda: {"type": "null"},
        lambda: {"enum": chance.sample(["red", 7, None, True, 1.5, "grün"], chance.randint(1, 4))},
        lambda: {"const": chance.choice(["c", 3])},
        lambda: {"type": ["null", "integer"], "minimum": 0, "maximum": 9},
    ]
    if depth > 0:
        kinds += 2 * [
            lambda: _object(chance, depth),
            lambda: {
                "type": "array",
                "items": _value(chance, depth - 1),
                "maxItems": chance.randint(0, 3),
            },
            lambda: {"anyOf": [_value(chance, depth - 1) for _ in range(2)]},
            lambda: {
                "type": "array",
                "prefixItems": [_value(chance, 0)],
                "items": False,
                "minItems": 1,
            },
        ]
    return chance.choice(kinds)()


def judge_of_schema(schema):
    """Return what says whether a text is JSON that follows the schema."""
    validator = jsonschema.Draft202012Validator(schema)
    return lambda text: validator.is_valid(json.loads(text))


def _expression(chance, depth, render):
    """Return an expression in the notation of ``render(kind, parts)``."""
    kind = chance.choice(["text", "class", "times"] + 2 * ["all", "any"] * (depth > 0))
    if kind == "text":
        parts = ["".join(chance.choice(LETTERS) for _ in range(chance.randint(1, 4)))]
    elif kind == "class":
        parts = sorted(chance.sample(LETTERS, 2))
    elif kind == "times":
        parts = [chance.choice(LETTERS), low := chance.randint(0, 2), low + chance.randint(0, 3)]
    else:
        parts = [_expression(chance, depth - 1, render) for _ in range(chance.randint(2, 3))]
    return render(kind, parts)


def _as_regex(kind, parts):
    return {
        "text": lambda: parts[0],
        "class": lambda: f"[{parts[0]}-{parts[1]}]",
        "times": lambda: f"{parts[0]}{{{parts[1]},{parts[2]}}}",
        "all": lambda: "".join(parts),
        "any": lambda: f"({'|'.join(parts)})",
    }[kind]()


def _as_rules(kind, parts):
    """Both GBNF and Lark have this notation."""
    return {
        "text": lambda: f'"{parts[0]}"',
        "class": lambda: f'("{parts[0]}" | "{parts[1]}")',
        "times": lambda: (
            "( " + " | ".join(f'"{parts[0] * n}"' for n in range(parts[1], parts[2] + 1)) + " )"
        ),
        "all": lambda: " ".join(parts),
        "any": lambda: f"({' | '.join(parts)})",
    }[kind]()


def _as_rules_regex(kind, parts):
    return f"[{''.join(parts)}]" if kind == "class" else _as_regex(kind, parts)


def random_form(chance, kind):
    """Return StructuredOutputsParams' fields of a kind, and a judge of texts."""
    if kind == "json":
        schema = random_schema(chance)
        compact = {"disable_any_whitespace": True} if chance.random() < 0.7 else {}
        return {"json": schema, **compact}, judge_of_schema(schema)
    if kind == "choice":
        texts = chance.sample(TEXTS, chance.randint(1, 5))
        return {"choice": texts}, lambda text: text in texts
    if kind == "regex":
        pattern = _expression(chance, 2, _as_regex)
        return {"regex": pattern}, lambda text: re.fullmatch(pattern, text) is not None
    seed = chance.random()
    rules, pattern = (
        _expression(type(chance)(seed), 2, render) for render in (_as_rules, _as_rules_regex)
    )
    head = chance.choice(["root ::= ", "start: "])
    return {"grammar": f"{head}{rules}\n"}, lambda text: re.fullmatch(pattern, text) is not None
