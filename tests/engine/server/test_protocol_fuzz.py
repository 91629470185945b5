"""No JSON, however odd, makes the request models raise anything but a bounded 400."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kiln.engine.errors import RequestError
from kiln.engine.server.errors import ApiError, from_engine, from_validation
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest, Defaults

_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-5, 25),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(["user", "text", "hello", "\x00", "a" * 300]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(["role", "content", "type", "text", "x"]), inner),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_json_is_taken_or_refused_in_a_line_or_two(model, data):
    names = st.sampled_from([*model.model_fields, "unknown"])
    good = {"messages": [{"role": "user", "content": "hi"}]}
    if model is CompletionRequest:
        good = {"prompt": "hi"}
    body = good | data.draw(st.dictionaries(names, _VALUES, max_size=5))
    try:
        model.model_validate_json(json.dumps(body)).sampling_params(Defaults())
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
