"""Tools are checked before a template prints them, in bounded time."""

from __future__ import annotations

import re

import pytest

from kiln.engine.errors import RequestError
from kiln.engine.text import tools as module
from kiln.engine.text.tools import read_tools


def tool(parameters=None, **fields):
    function = {"name": "get_weather", "description": "d", "parameters": parameters, **fields}
    return {"type": "function", "function": function}


GOOD = [
    {},
    {"type": "object", "properties": {"city": {"type": "string", "enum": ["a", "b"]}}},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": {"A": {"type": "null"}}},
    {"properties": {"a": {"$ref": "#/$defs/A"}, "b": {"anyOf": [{"type": "null"}, True]}}},
    {"prefixItems": [{"type": "integer"}], "items": False, "unevaluatedItems": False},
    {"items": [{"type": "integer"}], "additionalItems": False},  # draft 7
    {"type": ["string", "null"], "format": "uuid", "x-own": [{"type": "robot"}]},
    {"type": "number", "exclusiveMinimum": True, "minimum": 0},  # draft 4
    {"dependentRequired": {"a": ["b"]}, "required": ["a"], "minContains": 1},
]
BAD = [
    ({"type": "robot"}, "at type: 'robot' is not one of"),
    ({"properties": {"a": {"type": "str"}}}, "at properties.a.type: 'str'"),
    ({"properties": []}, "at properties"),
    ({"required": "a"}, "at required"),
    ({"$defs": {"A": {"minimum": "1"}}}, r"at \$defs.A.minimum"),
    ({"items": [{"items": 5}]}, "at items.0.items"),
    ({"prefixItems": {}}, "at prefixItems"),
    ({"anyOf": []}, "at anyOf"),
    (5, "must be a JSON Schema"),
    ([], "must be a JSON Schema"),
]


@pytest.mark.parametrize("schema", GOOD)
def test_a_json_schema_of_any_draft_is_accepted(schema):
    assert read_tools([tool(schema)]) == [tool(schema)]


@pytest.mark.parametrize(("schema", "part"), BAD)
def test_what_is_no_json_schema_is_refused_by_its_place(schema, part):
    with pytest.raises(RequestError, match=part) as caught:
        read_tools([tool({}), tool(schema)])
    assert caught.value.param == "tools[1].function.parameters"
    assert len(str(caught.value)) < 600


def nested(depth):
    schema = {"type": "robot", "description": "x" * 200_000}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


HOSTILE = {
    "levels": nested(100),
    "objects and lists": {"properties": {str(i): {} for i in range(10_000)}},
    "values": {"enum": list(range(100_000))},
    "characters": {"description": "x" * 300_000},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_schema_that_would_take_long_is_refused_unchecked(what, monkeypatch):
    monkeypatch.setattr(module, "_schemas", None)
    with pytest.raises(RequestError, match=f"more than [0-9]+ {what}") as caught:
        read_tools([tool(HOSTILE[what])])
    assert caught.value.param == "tools[0].function.parameters"


def test_a_schema_is_checked_once_for_all_requests(monkeypatch):
    wrong, fine = ({"type": kind, "title": "only here"} for kind in ("robot", "null"))
    read_tools([tool(fine)])
    with pytest.raises(RequestError):
        read_tools([tool(wrong)])
    monkeypatch.setattr(module, "_schemas", None)
    read_tools([tool(fine)])
    with pytest.raises(RequestError, match="'robot' is not one of"):
        read_tools([tool(wrong)])


def test_values_that_json_lacks_are_refused():
    with pytest.raises(RequestError, match="is not JSON") as caught:
        read_tools([tool({"default": {1, 2}})])
    assert caught.value.param == "tools[0].function.parameters"


def test_the_bounds_are_of_all_tools_together():
    part = {"properties": {str(i): {} for i in range(3000)}}
    read_tools([tool(part)] * 2)
    with pytest.raises(RequestError, match=r"^tools\[2\].function.parameters: the schemas of"):
        read_tools([tool(part)] * 3)


def test_a_wrong_schema_within_the_bounds_has_a_short_error():
    with pytest.raises(RequestError, match=r"is not a JSON Schema: at items\.items") as caught:
        read_tools([tool(nested(35))])
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("given", "param"),
    [
        (["f"], "tools[0].type"),
        ([{"type": "custom", "function": {"name": "f"}}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(name="a b")], "tools[0].function.name"),
        ([tool(name="x" * 65)], "tools[0].function.name"),
        ([tool(name=None)], "tools[0].function.name"),
        ([tool(strict=True)], "tools[0].function.strict"),
        ([tool()] * 1025, "tools"),
        ("f", "tools"),
    ],
)
def test_a_malformed_tool_is_refused_by_name(given, param):
    with pytest.raises(RequestError, match=re.escape(param)) as caught:
        read_tools(given)
    assert caught.value.param == param


def test_what_means_nothing_is_left_out_and_the_rest_kept():
    plain = {"type": "function", "function": {"name": "f", "description": "d"}}
    more = {**plain, "function": {**plain["function"], "strict": False, "parameters": None}}
    assert read_tools([{**more, "cache_control": {"type": "ephemeral"}}]) == [plain]
    assert read_tools([]) is None
    assert read_tools(None) is None
