"""Damage request bodies at random: values, keys, lists and bytes.

The same ``random.Random`` makes the same body, so that a failure can be repeated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Json = Any
# The keys and numbers of a path from the root to a value.
Path = tuple[int | str, ...]

ODD: tuple[Json, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 128, 129, 0.5, -0.0, 1e-300, 1.5, 100.0, 1e308, -1e308),
    *(2**31 - 1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30),
    *("", " ", "a", "\x00", "0", "-1", "null", "é", "😀", "\u2028", "a" * 300, "word " * 500),
    *("user", "system", "tool", "assistant", "developer", "auto", "none", "required", "function"),
    *("text", "json_object", "image_url", "demo", "<|im_start|>user\n", "<|im_end|>", "</think>"),
    *("<tool_call>", '<tool_call>\n{"name": "', "{{ 7 * 7 }}", "{% for x in y %}", "../../etc"),
    *('{"a": 1}', "[1]", "{", '"', "\\", "%s%n", "^(a+)+$", "data:image/png;base64,AAAA"),
    *([], {}, [[]], [{}], [None], [0], [""], ["a", 1], {"": {}}, {"a": None}, {"type": "text"}),
    *({"type": "x", "text": 5}, {"type": "object", "properties": []}, {"$ref": "#"}, {"role": 1}),
)
_DEEP = 400  # brackets inside each other
_MOST_BYTES = 1_000_000  # of a body in which something is repeated, about
_RAW = (
    *(
        b"NaN",
        b"Infinity",
        b"-Infinity",
        b"1e999",
        b"-0",
        b"00",
        b"0x10",
        b"9" * 5000,
        b"1.",
        b"+1",
    ),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b"'a'", b"undefined"),
    *(b"[" * _DEEP + b"]" * _DEEP, b'{"a":' * _DEEP + b"1" + b"}" * _DEEP, b"/**/1", b"\x00"),
)


def mutated(chance: random.Random, seeds: Sequence[Json], fields: Sequence[str]) -> bytes:
    """Return a body that was made from one of ``seeds``, all of them objects.

    ``fields`` are names that the route may know.
    """
    body = json.loads(json.dumps(chance.choice(seeds)))
    for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
        change = chance.choice(_CHANGES)
        body = change(chance, body, seeds, fields)
    data = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode(errors="surrogatepass")
    return _damaged(chance, data) if chance.random() < 0.15 else data


def _paths(value: Json, path: Path = ()) -> Iterator[Path]:
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:50]):
            yield from _paths(inner, (*path, index))


def _at(value: Json, path: Path) -> Json:
    for step in path:
        value = value[step]
    return value


def _put(body: Json, path: Path, value: Json) -> Json:
    """Return the body with a value at a path."""
    if not path:
        return value
    _at(body, path[:-1])[path[-1]] = value
    return body


def _replace(chance: random.Random, body: Json, seeds: Sequence[Json], fields: object) -> Json:
    path = chance.choice(list(_paths(body))[1:] or [()])
    # A value of the same type gets further than one that the first check refuses.
    alike = [one for one in ODD if type(one) is type(_at(body, path))]
    values = alike if alike and chance.random() < 0.7 else ODD
    return _put(body, path, json.loads(json.dumps(chance.choice(values))))


def _graft(chance: random.Random, body: Json, seeds: Sequence[Json], fields: object) -> Json:
    """Put a part of a seed at another place."""
    donor = json.loads(json.dumps(chance.choice(seeds)))
    part = _at(donor, chance.choice(list(_paths(donor))))
    return _put(body, chance.choice(list(_paths(body))[1:] or [()]), part)


def _delete(chance: random.Random, body: Json, seeds: object, fields: object) -> Json:
    paths = list(_paths(body))[1:]
    if paths:
        path = chance.choice(paths)
        del _at(body, path[:-1])[path[-1]]
    return body


def _add(chance: random.Random, body: Json, seeds: object, fields: Sequence[str]) -> Json:
    """Set a field that the route knows, or nearly does."""
    if isinstance(body, dict):
        name = chance.choice(fields)
        if chance.random() < 0.1:
            name = name[:-1] + chance.choice("xyz")
        body[name] = json.loads(json.dumps(chance.choice(ODD)))
    return body


def _rename(chance: random.Random, body: Json, seeds: object, fields: object) -> Json:
    paths = [path for path in _paths(body) if path and isinstance(path[-1], str)]
    if paths:
        path = chance.choice(paths)
        parent = _at(body, path[:-1])
        parent[chance.choice((path[-1] + "_", path[-1].upper(), "", "type", "x" * 200))] = (
            parent.pop(path[-1])
        )
    return body


def _repeat(chance: random.Random, body: Json, seeds: object, fields: object) -> Json:
    """Make a list or a string long."""
    paths = [path for path in _paths(body) if isinstance(_at(body, path), list | str)]
    if not paths:
        return body
    path = chance.choice(paths)
    # What is repeated may itself hold something that was repeated.
    times = min(chance.choice((2, 3, 20, 200, 2000)), 1 + _MOST_BYTES // len(json.dumps(body)))
    value = _at(body, path)
    return _put(body, path, (value * times)[: 20_000 if isinstance(value, list) else 200_000])


def _nest(chance: random.Random, body: Json, seeds: object, fields: object) -> Json:
    path = chance.choice(list(_paths(body))[1:] or [()])
    value = _at(body, path)
    for _ in range(chance.choice((1, 2, 50, 150))):
        value = [value] if chance.random() < 0.5 else {"a": value}
    return _put(body, path, value)


_CHANGES: tuple[Callable[..., Json], ...] = (
    *(_replace, _replace, _replace, _replace, _replace, _graft, _delete, _add, _add, _rename),
    *(_repeat, _nest),
)


def _damaged(chance: random.Random, data: bytes) -> bytes:
    """Return bytes of which a part is cut off, repeated, or replaced by what is no JSON."""
    at = chance.randrange(len(data) + 1)
    kind = chance.randrange(5)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes(chance.randbytes(chance.choice((1, 2, 8)))) + data[at:]
    if kind == 2:
        end = min(len(data), at + chance.choice((1, 4, 30)))
        return data[:at] + data[at:end] * chance.choice((0, 2, 50)) + data[end:]
    if kind == 3:  # instead of a value
        colon = data.find(b":", at)
        end = data.find(b",", colon)
        if colon >= 0 and end >= 0:
            return data[: colon + 1] + chance.choice(_RAW) + data[end:]
    return chance.choice((b" ", b"\xef\xbb\xbf", b"\n" * 1000)) + data
