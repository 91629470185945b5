"""The shape of a body is bounded before anything is made of it."""

import json

import pytest
from pydantic import ValidationError

from kiln.engine.server.body import MAX_CONTAINERS, MAX_KEYS, check_shape
from kiln.engine.server.errors import ApiError
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest

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
