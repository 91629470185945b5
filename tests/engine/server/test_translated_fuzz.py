"""No JSON, however odd, makes a body of another API raise anything but a bounded 400."""

import json

import pytest
from depth import at_depth
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kiln.engine.errors import RequestError
from kiln.engine.server.anthropic import translation as anthropic
from kiln.engine.server.anthropic.body import MessagesRequest
from kiln.engine.server.errors import ApiError, from_engine, from_validation
from kiln.engine.server.protocol import ChatCompletionRequest, Defaults
from kiln.engine.server.responses_api import translation as responses
from kiln.engine.server.responses_api.body import ResponsesRequest

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-5, 25),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["user", "assistant", "text", "tool_use", "tool_result", "thinking", "auto"]),
    st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "{}"]),
)
_NAMES = ["role", "content", "type", "text", "id", "name", "input", "call_id", "output", "x"]
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(_NAMES), inner)
    ),
    max_leaves=8,
)
_BLOCKS = [
    {"type": "text", "text": "a"},
    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
    {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "a"}]},
    {"type": "thinking", "thinking": "a", "signature": ""},
]
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "a"},
    {"type": "reasoning", "id": "r", "summary": [], "content": []},
]


def _changed(known):
    """One of the known objects with some fields changed."""
    return st.sampled_from(known).flatmap(
        lambda one: st.dictionaries(st.sampled_from([*one, "x"]), _VALUES, max_size=2).map(
            lambda changes: one | changes
        )
    )


_TURNS = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["user", "assistant", "system"]),
    st.one_of(st.text(max_size=5), st.lists(_changed(_BLOCKS), max_size=3)),
)


@pytest.mark.parametrize("model", [MessagesRequest, ResponsesRequest])
@settings(max_examples=at_depth(40, 5000), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_json_is_taken_or_refused_in_a_line_or_two(model, data):
    if model is MessagesRequest:
        translate = anthropic.chat_request
        good = {"messages": data.draw(st.lists(_TURNS, max_size=3)), "max_tokens": 5}
    else:
        translate = responses.chat_request
        good = {"input": data.draw(st.lists(_changed(_ITEMS), max_size=3))}
    names = st.sampled_from([*model.model_fields, "unknown"])
    body = good | data.draw(st.dictionaries(names, _VALUES, max_size=2))
    try:
        chat = translate(model.model_validate_json(json.dumps(body)))
        ChatCompletionRequest.model_validate(chat).sampling_params(Defaults())
    except ValidationError as error:
        refusal = from_validation(error, model)
    except ApiError as error:
        refusal = error
    except RequestError as error:
        refusal = from_engine(error)
    else:
        return
    assert refusal.status == 400
    assert 0 < len(refusal.message) <= 600
    assert refusal.message.count("\n") <= 1
