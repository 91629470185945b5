"""Calls over HTTP are valid whatever the model says, in every format, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import random

import openai
import pytest
from jsonschema import Draft202012Validator
from random_schemas import bounded, tool_schema

from kiln.engine.text.replies.choice import tool_formats

NUM_CASES = 56  # of each format: 504 of all nine, streamed and whole
NAMES = ["get_weather", "now", "f-1.x"]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)
NAMED = {"type": "function", "function": {"name": NAMES[0]}}
SOME = {"mode": "required", "tools": [NAMED]}
CHOICES = ["required", NAMED, {"type": "allowed_tools", "allowed_tools": SOME}, "auto"]
FREE = [{"max_tokens": 30, "seed": seed} for seed in range(3)]


@pytest.fixture(scope="module")
def url(start, model_folder, tmp_path_factory, request):
    """A server whose model has random weights, and ends an answer by one token alone."""
    folder = tmp_path_factory.mktemp("models") / "tools"
    folder.mkdir()
    for file in model_folder.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--max-num-seqs", "24", "--num-kv-blocks", "400", "--tool-call-parser", request.param]
    with start(*flags, model=folder) as (client, _):
        yield str(client.base_url)


def body_of(case):
    """A request that demands calls, and the schemas of its functions."""
    rng = random.Random(case)
    schemas = {name: bounded(tool_schema(rng)) for name in NAMES[: rng.randrange(1, 4)]}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
        for name, schema in schemas.items()
    ]
    more = {"parallel_tool_calls": False} if case % 3 == 0 else {}
    choice = CHOICES[case % 4]
    most = 60 if choice == "auto" else 1500
    settings = {"temperature": case % 3, "seed": case, "max_tokens": most}
    return {"tools": tools, "tool_choice": choice, **settings, **more}, schemas


async def answer(client, body, *, stream):
    """The content, calls and finish reason; None if the format has no syntax for a schema."""
    asked = {"model": None, "messages": [{"role": "user", "content": "x"}], **body}
    try:
        done = await client.chat.completions.create(**asked, stream=stream)
    except openai.BadRequestError as error:
        if "format of calls cannot write" in str(error):
            return None
        raise
    if not stream:
        (choice,) = done.choices
        functions = [call.function for call in choice.message.tool_calls or ()]
        calls = [(one.name, one.arguments) for one in functions]
        return choice.message.content or "", calls, choice.finish_reason
    content, names, arguments, reason = "", {}, {}, None
    async for chunk in done:
        (choice,) = chunk.choices
        content, reason = content + (choice.delta.content or ""), choice.finish_reason
        for call in choice.delta.tool_calls or ():
            names.setdefault(call.index, call.function.name)
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    return content, [(name, arguments[index]) for index, name in names.items()], reason


def answers(url, bodies, *, stream):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            asked = (answer(client, body, stream=stream) for body in bodies)
            return await asyncio.gather(*asked)

    return asyncio.run(all_of_them())


@pytest.mark.deep
@pytest.mark.parametrize("url", [form.names[0] for form in tool_formats()], indirect=True)
def test_every_call_is_valid(url):
    made = [body_of(case) for case in range(NUM_CASES)]
    for stream in (False, True):
        alone = answers(url, FREE, stream=stream)
        found = answers(url, [*FREE, *(body for body, _ in made)], stream=stream)
        assert found[:3] == alone, "others change nothing"
        ended = [one is not None and one[2] != "length" for one in found[3:]]
        assert sum(ended) >= NUM_CASES / 2, "texts and reasoning have no bound, all else has"
        for (body, schemas), one in zip(made, found[3:], strict=True):
            if one is not None:
                check(body, schemas, *one)


def check(body, schemas, content, calls, reason):
    whole = calls if reason != "length" else calls[:-1]  # the last one may be cut off
    for name, arguments in whole:
        Draft202012Validator(schemas[name]).validate(json.loads(arguments))
    if body["tool_choice"] == "auto" or reason == "length":
        return
    assert reason == ("stop" if body["tool_choice"] == NAMED else "tool_calls"), calls
    assert calls
    assert not content
    if body["tool_choice"] == NAMED or "parallel_tool_calls" in body:
        assert len(calls) == 1
    if body["tool_choice"] != "required":
        assert {name for name, _ in calls} == {NAMES[0]}
