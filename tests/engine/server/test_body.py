"""The shape of a body is bounded before anything is made of it."""

import asyncio
import json

import pytest
from pydantic import ValidationError
from starlette.requests import Request

from kiln.engine.server.body import MAX_CONTAINERS, MAX_KEYS, check_shape, read_body
from kiln.engine.server.errors import ApiError
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest
from kiln.engine.server.threads import Threads

USER = {"role": "user", "content": "x"}


def chat(messages):
    return json.dumps({"messages": messages}).encode()


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": [[]' + b",[]" * MAX_CONTAINERS + b"]}",
        chat([{} for _ in range(MAX_CONTAINERS)]),
        b'{"a": "\\\\", "b": [' + b"[" * MAX_CONTAINERS,
        b'{"a": "\\"", "b": [' + b"[" * MAX_CONTAINERS,
        json.dumps({str(i): i for i in range(MAX_KEYS + 1)}).encode(),
    ],
)
def test_too_many_objects_lists_or_keys_are_refused(data):
    with pytest.raises(ApiError, match="at most") as caught:
        check_shape(data)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "text", ["[" * MAX_CONTAINERS * 2, '{"a": ["\\"]}' * MAX_CONTAINERS, ":" * 2 * MAX_KEYS]
)
def test_brackets_and_colons_inside_strings_do_not_count(text):
    check_shape(json.dumps({"prompt": text}).encode())
    check_shape(json.dumps({"prompt": [text, "\\", text]}).encode())


def test_a_long_prompt_of_tokens_is_fine():
    check_shape(json.dumps({"prompt": list(range(500_000))}).encode())


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatCompletionRequest, {"messages": [5] * 5000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [5] * 5000}]}),
        (CompletionRequest, {"prompt": [""] * 5000}),
        (CompletionRequest, {"prompt": [[5]] * 5000}),
        (CompletionRequest, {"prompt": "a", "stop": ["a"] * 5000}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [5] * 5000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": {str(i): 1 for i in range(5000)}}),
    ],
)
def test_a_long_list_is_one_error(model, body):
    with pytest.raises(ValidationError) as caught:
        model.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 2


def _read(body, **options):
    data = json.dumps(body).encode()

    async def receive():
        return {"type": "http.request", "body": data}

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
    }
    request = Request(scope, receive)
    return asyncio.run(read_body(request, CompletionRequest, Threads(), **options))


def test_unknown_fields_are_one_line_of_the_log_if_they_are_ignored(caplog):
    body = {"prompt": "a", "mood": 1, "new\nline": 2, "stream_options": {"x": 3}}
    with pytest.raises(ApiError, match="mood: is not a known field"):
        _read(body)
    assert not caplog.records
    assert _read(body, ignore_unknown=True).prompt == "a"
    (record,) = caplog.records
    said = "/v1/completions: ignored unknown fields: stream_options.x, mood, new\\nline"
    assert record.getMessage() == said


@pytest.mark.parametrize(
    ("body", "part"),
    [
        ({"prompt": "a", "mood": 1, "top_p": "x"}, "top_p: must be a number"),
        ({"prompt": "a", "mood": 1, "suffix": "x"}, "suffix: is not supported yet"),
        ({"mood": 1}, "prompt: is required"),
        ({"prompt": "a", "top_p": "x"}, "top_p: must be a number"),
    ],
)
def test_what_is_wrong_stays_an_error_if_unknown_fields_are_ignored(body, part):
    with pytest.raises(ApiError, match=part):
        _read(body, ignore_unknown=True)


def test_many_unknown_fields_are_ignored_too(caplog):
    body = {"prompt": "a", **{f"f{i}": i for i in range(500)}}
    assert _read(body, ignore_unknown=True).prompt == "a"
    assert len(caplog.records[0].getMessage()) < 400
