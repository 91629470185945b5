"""The real openai client's Responses API, with reasoning and a loop that calls functions."""

from pathlib import Path

import openai
import pytest
from reply_texts import FORMATS, NOW, WEATHER
from writing_engine import Scribe, app_of, serving, tokenizer_with_tools

CALLS = f"<think>Let me see.</think>I'll look.\n{FORMATS[0].write([WEATHER, NOW])}"
ANSWER = "It rains in Zürich."
SCHEMA = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}
    for name in ("get_weather", "now")
]
QUESTION = {"role": "user", "content": "What is the weather?"}
KEY = "sk-test"
DEMO = Path(__file__).parents[2] / "engine/demo"


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with_tools(DEMO)


@pytest.fixture
def client(tokenizer):
    """A client of a server whose model calls functions first, and then answers."""
    with serving(app_of(Scribe(tokenizer, CALLS, ANSWER), tokenizer, api_key=KEY)) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120)


def ask(client, items, stream):
    options = {"model": "tiny", "input": items, "tools": TOOLS}
    if not stream:
        return client.responses.create(**options)
    with client.responses.stream(**options) as events:
        return events.get_final_response()


@pytest.mark.parametrize("form", ["object", "dict"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_that_calls_functions(client, stream, form):
    said = ask(client, [QUESTION], stream)
    assert [item.type for item in said.output] == [
        *("reasoning", "message", "function_call", "function_call"),
    ]
    assert said.output_text == "I'll look."
    calls = [item for item in said.output if item.type == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": call.name}
        for call in calls
    ]
    output = [item if form == "object" else item.model_dump() for item in said.output]
    assert ask(client, [QUESTION, *output, *results], stream).output_text == ANSWER


def test_what_is_not_kept_is_refused_and_not_found(client):
    for refused in ({"store": True}, {"previous_response_id": "resp_1"}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="not kept"):
            client.responses.create(model="tiny", input="hi", **refused)
    for find in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not kept"):
            find("resp_1")


def test_a_wrong_key_is_an_authentication_error(client):
    other = client.with_options(api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        other.responses.create(model="tiny", input="hi")
