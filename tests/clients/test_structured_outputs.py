"""What clients ask for has its form: the demo model says anything, but in that form.

``structured_bodies.json`` has requests of clients that `make test` does not install.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from kiln.engine.cli.options import DEMO_FOLDER
from kiln.engine.text.tokenizer import Tokenizer

BODIES = json.loads((Path(__file__).parent / "structured_bodies.json").read_text())
QUESTION = "How is the weather in Oslo?"
# The tokens of the demo model for a line break and a space, of which it writes many.
NO_SPACE = dict.fromkeys(map(str, Tokenizer.load(DEMO_FOLDER).encode("\n ")), -100)
MESSAGES = [{"role": "user", "content": QUESTION}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Oslo", "Rome"]
    warm: bool
    season: Literal["summer", "winter"] | None


@pytest.fixture(scope="module")
def client(locked_url, api_key):
    return openai.OpenAI(base_url=f"{locked_url}/v1", api_key=api_key, max_retries=0, timeout=120)


def test_openais_parse_gives_a_model(client):
    options = {"model": "demo", "max_completion_tokens": 600, "logit_bias": NO_SPACE}
    options["temperature"] = 0
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Weather, **options)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(
        messages=MESSAGES, response_format=Weather, **options
    ) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == answer.choices[0].message.parsed


def test_openais_parse_reads_a_strict_call(client):
    answer = client.chat.completions.parse(
        model="demo",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_completion_tokens=600,
        logit_bias=NO_SPACE,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_openais_parse_reads_a_response(client):
    answer = client.responses.parse(
        model="demo", input=QUESTION, text_format=Weather, max_output_tokens=600
    )
    assert isinstance(answer.output_parsed, Weather)


@pytest.mark.quick(3)
@pytest.mark.parametrize("one", BODIES, ids=[one["client"] for one in BODIES])
def test_a_clients_request_is_answered_in_its_form(locked_url, api_key, one):
    body = one["body"]
    if one["path"] == "/v1/chat/completions":
        body = {"logit_bias": NO_SPACE, **body}
    headers = {"Authorization": f"Bearer {api_key}"}
    answer = httpx.post(f"{locked_url}{one['path']}", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    content = _content(one["path"], answer.json())
    assert content is not None, answer.text
    Draft202012Validator(one["schema"]).validate(json.loads(content))


def _content(path, answer):
    """Return the text or the arguments of the one call."""
    if path == "/v1/responses":
        (item,) = answer["output"]
        return item["content"][0]["text"] if item["type"] == "message" else item["arguments"]
    if path == "/v1/messages":
        (block,) = answer["content"]
        return block["text"] if block["type"] == "text" else json.dumps(block["input"])
    message = answer["choices"][0]["message"]
    calls = message.get("tool_calls")
    return calls[0]["function"]["arguments"] if calls else message["content"]


WANTED = {
    "instructor": {"TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"},
    "pydantic_ai": {"tool", "native", "responses"},
    "ai_sdk": {"object", "streamed", "call", "word"},
    "langchain": {"json_schema", "function_calling", "strict", "json_mode"},
}


@pytest.mark.deep
@pytest.mark.timeout(3000)  # the first installs its client
@pytest.mark.parametrize("client_name", WANTED)
def test_real_clients_get_their_form(run_client, locked_url, api_key, client_name):
    said = run_client(client_name, "structured", locked_url, api_key)
    assert set(said) == WANTED[client_name]
    for name, answer in said.items():
        if name == "word":
            assert answer in ("sunny", "rainy")
        elif name == "json_mode":
            assert isinstance(answer, dict)
        else:
            Weather.model_validate(answer)
