"""Raw text of arguments becomes JSON by the types of the schema."""

from __future__ import annotations

import json
import sys

import pytest

from kiln.engine.text.replies import typed_values
from kiln.engine.text.replies.choice import ReplyFormats, tool_formats
from kiln.engine.text.replies.typed_values import typed, types_of

PYTHONIC = next(form for form in tool_formats() if "pythonic" in form.names)


def test_a_schema_that_refers_to_itself_is_looked_at_once(monkeypatch):
    looked, look = [], typed_values.referred
    monkeypatch.setattr(
        typed_values, "referred", lambda *given: looked.append(given) or look(*given)
    )
    union = [{"$ref": "#/properties/a"}] * 10 + [{"type": "null"}, {"$ref": "#/properties/b"}]
    schema = {"properties": {"a": {"anyOf": union}, "b": {"type": ["integer", "string"]}}}
    assert types_of(schema, "a") == {"null", "integer", "string"}
    assert len(looked) < 20


@pytest.mark.parametrize("number", ["1e999", "-1e999", "[1, 2e400]", '{"a": -3E500}'])
def test_a_number_beyond_those_of_float_is_the_largest_one(number):
    """Readers of other languages have no infinite numbers in JSON, and would see a string."""
    kinds = frozenset(("number", "array", "object"))
    largest = json.dumps(sys.float_info.max)
    assert largest in typed(number, kinds)
    assert not typed(number, kinds).startswith('"')
    reader = ReplyFormats(PYTHONIC).reader([{"type": "function", "function": {"name": "f"}}])
    (call,) = reader.push(f"[f(a={number})]", last=True).tool_calls
    assert largest in call.arguments
