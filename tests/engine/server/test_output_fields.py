"""What an output must look like, in the words of OpenAI, vLLM and SGLang: one setting."""

from __future__ import annotations

import json

import pytest
from scripted_engine import Writer
from writing_engine import post, tokenizer_with_tools

from kiln.engine.requests.structured_outputs import StructuredOutputsParams
from kiln.engine.server.anthropic.body import MessagesRequest
from kiln.engine.server.anthropic.translation import chat_request as chat_of_messages
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest, Defaults
from kiln.engine.server.responses_api.body import ResponsesRequest
from kiln.engine.server.responses_api.translation import chat_request as chat_of_responses

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "x", "schema": SCHEMA}
USER = [{"role": "user", "content": "hi"}]
JSON = {"json": SCHEMA}
DEEP = json.loads('{"items":' * 101 + "{}" + "}" * 101)


@pytest.fixture(scope="module")
def tools_tokenizer(tokenizer_folders):
    return tokenizer_with_tools(tokenizer_folders["byte-level"])


def schema_format(**changes):
    return {"type": "json_schema", "json_schema": {**NAMED, **changes}}


def params_of(model, **fields):
    body = {"prompt": "hi"} if model is CompletionRequest else {"messages": USER}
    return model.model_validate_json(json.dumps({**body, **fields})).sampling_params(Defaults())


MEANINGS = [
    ({}, None),
    ({"response_format": {"type": "text"}, "structured_outputs": None}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": schema_format()}, JSON),
    ({"response_format": schema_format(strict=True, description="d")}, JSON),
    ({"response_format": schema_format(strict=False, name=None)}, JSON),
    ({"response_format": {"type": "text"}, "guided_json": SCHEMA}, JSON),
    ({"structured_outputs": JSON}, JSON),
    ({"structured_outputs": {"json": "{}", "regex": None}}, {"json": "{}"}),
    ({"structured_outputs": {"json": True}}, {"json": True}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, {"grammar": 'root ::= "a"'}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    (
        {"structured_outputs": {**JSON, "disable_any_whitespace": True, "whitespace_pattern": " "}},
        {**JSON, "disable_any_whitespace": True, "whitespace_pattern": " "},
    ),
    (
        {"structured_outputs": {**JSON, "disable_additional_properties": True}},
        {**JSON, "disable_additional_properties": True},
    ),
    ({"guided_json": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
    ({"guided_regex": "a"}, {"regex": "a"}),
    ({"guided_choice": ["a"]}, {"choice": ["a"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"json_schema": json.dumps(SCHEMA)}, {"json": json.dumps(SCHEMA)}),
    ({"regex": "a"}, {"regex": "a"}),
    ({"ebnf": 'root ::= "a"'}, {"grammar": 'root ::= "a"'}),
]


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@pytest.mark.parametrize(("fields", "meaning"), MEANINGS)
def test_every_name_means_one_setting(model, fields, meaning):
    wanted = None if meaning is None else StructuredOutputsParams(**meaning)
    assert params_of(model, **fields).structured_outputs == wanted


WRONG = [
    ({"response_format": schema_format(schema=DEEP)}, "response_format.json_schema.schema", "100"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "has nothing"),
    ({"structured_outputs": {**JSON, "regex": "a"}}, "structured_outputs", "json and regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "is not JSON"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "must be a JSON Schema"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "not empty"),
    ({"structured_outputs": {"jsn": {}}}, "structured_outputs.jsn", "is not a known field"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "null"),
    ({"guided_json": "[1]"}, "guided_json", "must be a JSON Schema"),
    ({"guided_choice": []}, "guided_choice", "not empty"),
    ({"guided_regex": "a" * 40_000}, "guided_regex", "40000 characters"),
    ({"ebnf": "root ::= ("}, "ebnf", "GBNF"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
    ({"response_format": schema_format(schema=5)}, "response_format.json_schema.schema", "object"),
    ({"regex": "a", "guided_choice": ["a"]}, "regex", "cannot be sent together with guided_choice"),
    (
        {"response_format": schema_format(), "structured_outputs": JSON},
        "structured_outputs",
        "cannot be sent together with response_format",
    ),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("fields", "param", "part"), WRONG)
def test_a_wrong_form_is_refused_by_the_name_that_was_sent(tokenizer, path, fields, param, part):
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": USER}
    writer = Writer(tokenizer, "x")
    answer = post(writer, tokenizer, path, {**body, **fields}, parser="none", reasoning="none")
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["message"].startswith(f"{param}: ")
    assert part in error["message"]
    assert not writer.requests


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_engine_gets_the_grammar_alone(tokenizer, path):
    body = {"prompt": "hi"} if path == "/v1/completions" else {"messages": USER}
    writer = Writer(tokenizer, '{"a": 1}')
    body = {**body, "response_format": schema_format()}
    answer = post(writer, tokenizer, path, body, parser="none", reasoning="none")
    assert answer.status_code == 200, answer.text
    (request,) = writer.requests
    assert json.loads(request.grammar)["grammars"][0]["json_schema"]["required"] == ["a"]
    assert request.params.structured_outputs is None


RESPONSES = [
    ({"type": "text"}, {"type": "text"}),
    ({"type": "json_object"}, {"type": "json_object"}),
    ({"type": "json_schema", **NAMED, "strict": True}, schema_format(strict=True)),
]


@pytest.mark.parametrize(("sent", "meant"), RESPONSES)
def test_a_response_has_the_form_of_its_text(sent, meant):
    body = ResponsesRequest.model_validate({"input": "hi", "text": {"format": sent}})
    chat = ChatCompletionRequest.model_validate(chat_of_responses(body))
    meant = ChatCompletionRequest.model_validate({"messages": USER, "response_format": meant})
    assert chat.output_form == meant.output_form


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_anthropics_form_is_a_schema(place):
    form = {"type": "json_schema", "schema": SCHEMA}
    form = {"format": form} if place == "output_config" else form
    body = {"messages": USER, "max_tokens": 5, place: form}
    chat = chat_of_messages(MessagesRequest.model_validate(body))
    chat = ChatCompletionRequest.model_validate(chat)
    assert chat.output_form == StructuredOutputsParams(json=SCHEMA)


UNKNOWN = {"type": "object", "properties": {"a": {"not": {}}}}
TOOL = {"name": "f", "parameters": UNKNOWN, "strict": True}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "guided_json": UNKNOWN}, "guided_json"),
        ("/v1/chat/completions", {"response_format": schema_format(schema=UNKNOWN)}, None),
        ("/v1/chat/completions", {"tools": [{"type": "function", "function": TOOL}]}, "tools"),
        ("/v1/responses", {"tools": [{"type": "function", **TOOL}], "input": "x"}, "tools"),
        (
            "/v1/messages",
            {"output_format": {"type": "json_schema", "schema": UNKNOWN}, "max_tokens": 5},
            "output_config.format",
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_the_name_that_was_sent(
    tools_tokenizer, path, body, param
):
    body = body if path in ("/v1/responses", "/v1/completions") else {"messages": USER, **body}
    writer = Writer(tools_tokenizer, "x")
    answer = post(writer, tools_tokenizer, path, body, parser="hermes", reasoning="none")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(f"{param or 'response_format'}: Unimplemented keys")
    assert error.get("param", param) in (param, "response_format")
    assert not writer.requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": DEEP}}},
            "text.format.schema",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": DEEP}}},
            "output_config.format.schema",
        ),
    ],
)
def test_other_apis_name_their_own_field(tokenizer, path, body, param):
    body |= {"input": "hi"} if path == "/v1/responses" else {"messages": USER, "max_tokens": 5}
    writer = Writer(tokenizer, "x")
    answer = post(writer, tokenizer, path, body, parser="none", reasoning="none")
    assert answer.status_code == 400
    assert f"{param}: has more than 100 levels" in answer.text
