"""The OpenAPI document says what every field means, and what happens without it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kiln.engine.server import answer_fields, part_fields
from kiln.engine.server.app import _BODIES as BODIES
from kiln.engine.server.app import create_app
from kiln.engine.server.examples import EXAMPLES
from kiln.engine.server.field_table import TABLES
from kiln.engine.server.protocol import ChatCompletionRequest
from kiln.engine.server.route_fields import ROUTE_TABLES
from kiln.engine.server.serving import ServerSettings

WITHOUT_EFFECT = ("No effect", "Not supported yet")


@pytest.fixture(scope="module")
def document():
    engine = SimpleNamespace(stats=dict, is_ready=True)
    return create_app(engine, None, ServerSettings(("m",))).openapi()


def _reached(document, node, found):
    """The names of the schemas that a part of the document refers to, directly or not."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        if key == "$ref":
            name = value.removeprefix("#/components/schemas/")
            if name not in found:
                found.add(name)
                _reached(document, document["components"]["schemas"][name], found)
        elif isinstance(value, dict | list):
            _reached(document, value, found)
    return found


def _names(document, part):
    operations = [one for path in document["paths"].values() for one in path.values()]
    found = set()
    for operation in operations:
        _reached(document, operation.get(part, {}), found)
    return found


def _fields(document, names):
    schemas = document["components"]["schemas"]
    return [
        (name, field, shape, field in schemas[name].get("required", []))
        for name in sorted(names)
        for field, shape in schemas[name].get("properties", {}).items()
    ]


def test_every_field_of_a_body_has_a_meaning_and_says_what_happens_without_it(document):
    fields = _fields(document, _names(document, "requestBody"))
    assert len(fields) > 300
    for name, field, shape, is_required in fields:
        says = shape.get("description", "")
        assert says, f"{name}.{field}: give it words in part_fields.py"
        acts = shape.get("x-kiln", "acting") == "acting" and not says.startswith(WITHOUT_EFFECT)
        told = "default" in says or shape.get("default") is not None
        assert told or is_required or not acts, f"{name}.{field}: what happens without it?"
        assert not (is_required and "default" in says), f"{name}.{field} is required"


def test_every_field_of_an_answer_has_a_meaning(document):
    for name, field, shape, _ in _fields(document, _names(document, "responses")):
        assert shape.get("description"), f"{name}.{field}: give it words in answer_fields.py"


def test_words_are_of_fields_that_there_are(document):
    """A field that was renamed leaves no words behind."""
    schemas = document["components"]["schemas"]
    for table in (part_fields.PARTS, answer_fields.ANSWERS):
        for name, fields in table.items():
            assert fields.keys() <= schemas[name]["properties"].keys(), name
    for anywhere, table in (
        (part_fields.ANYWHERE, part_fields.PARTS),
        (answer_fields.ANYWHERE, answer_fields.ANSWERS),
    ):
        used = {field for name in table for field in schemas[name]["properties"]}
        used |= {field for name in schemas for field in schemas[name].get("properties", {})}
        assert anywhere.keys() <= used


def test_a_name_stands_for_one_object(document):
    """The message of an answer is not the message of a body."""
    bodies, answers = _names(document, "requestBody"), _names(document, "responses")
    assert not bodies & answers
    assert set(TABLES | ROUTE_TABLES) <= bodies
    message = document["components"]["schemas"]["AssistantMessage"]["properties"]
    assert {"content", "reasoning_content", "tool_calls", "refusal"} <= message.keys()
    assert bodies | answers == set(document["components"]["schemas"]), "others are not used"


def test_every_route_says_what_it_does_and_what_it_answers(document):
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], (path, method)
            assert "422" not in operation["responses"], "routes parse their parameters themselves"
            for one in operation.get("parameters", []):
                assert one["description"], (path, one["name"])
            assert operation["tags"], "a page shows the routes of a tag together"


def test_null_is_no_value_of_a_field_that_may_be_missing(document):
    """Clients send null for what they leave out, and the document says that they may."""
    for model in BODIES:
        example = EXAMPLES[model.__name__]
        for field, shape in document["components"]["schemas"][model.__name__]["properties"].items():
            if shape.get("default", ...) is None and field not in example:
                model.model_validate({**example, field: None})
    chat = {**EXAMPLES["ChatCompletionRequest"], "structured_outputs": {"json": None, "regex": "a"}}
    assert ChatCompletionRequest.model_validate(chat).output_form.regex == "a"


def test_the_document_is_valid(document):
    """Where its validator is installed, as it is with the tests of clients."""
    pytest.importorskip("openapi_spec_validator").validate(document)
