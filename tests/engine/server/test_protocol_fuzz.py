"""No JSON, however odd, makes the request models raise anything but a bounded 400."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kiln.engine.errors import RequestError
from kiln.engine.server.errors import ApiError, from_engine, from_validation
from kiln.engine.server.protocol import ChatCompletionRequest, CompletionRequest, Defaults
from kiln.engine.text.tokenizer import Tokenizer

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
_FUNCTION = st.fixed_dictionaries({"name": st.just("f"), "arguments": _VALUES | st.just('{"a":1}')})
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
        optional={
            "content": st.text(max_size=5) | st.just([{"type": "text", "text": "x"}]) | st.none(),
            "tool_calls": st.lists(st.fixed_dictionaries({"function": _FUNCTION}), max_size=2),
            "tool_call_id": st.just("c"),
            "reasoning": st.text(max_size=3),
        },
    ),
    min_size=1,
    max_size=4,
)
_TOOLS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": st.just("f")}, optional={"parameters": _VALUES}
            ),
        }
    ),
    max_size=2,
)


@pytest.fixture(scope="module")
def chats(model_folder):
    source = (
        "{% for m in messages %}{{ m.role + m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}{{ tools | tojson }}"
    )
    return Tokenizer.load(model_folder, source)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@settings(max_examples=400, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_json_is_taken_or_refused_in_a_line_or_two(model, data, chats):
    names = st.sampled_from([*model.model_fields, "unknown"])
    good = {"messages": [{"role": "user", "content": "hi"}]}
    if model is CompletionRequest:
        good = {"prompt": "hi"}
    if model is ChatCompletionRequest and data.draw(st.booleans()):
        good = {"messages": data.draw(_MESSAGES), "tools": data.draw(_TOOLS)}
    body = good | data.draw(st.dictionaries(names, _VALUES, max_size=5))
    try:
        read = model.model_validate_json(json.dumps(body))
        read.sampling_params(Defaults())
        read.read_prompts(chats, 512)
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
