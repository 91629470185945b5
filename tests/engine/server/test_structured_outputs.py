"""Structured outputs over HTTP: valid whatever the model says, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import random

import openai
import pytest
from depth import at_depth
from random_grammars import judge_of_schema, random_form, random_schema

NUM_CASES = at_depth(12, 500)
KINDS = ["json", "regex", "choice", "grammar"]


@pytest.fixture(scope="module")
def url(start, model_folder, tmp_path_factory):
    """A server whose model ends an answer by one token alone."""
    folder = tmp_path_factory.mktemp("models") / "structured"
    folder.mkdir()
    for file in model_folder.iterdir():
        if file.name != "generation_config.json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    with start("--max-num-seqs", "24", "--num-kv-blocks", "400", model=folder) as (client, _):
        yield str(client.base_url)


def outputs(url, bodies, *, stream):
    """The text and the finish reason of each completion; so many grammars are new at once."""
    at_once = asyncio.Semaphore(16)

    async def one(client, body):
        async with at_once:
            return await ask(client, body)

    async def ask(client, body):
        asked = {"model": None, "max_tokens": 1500, "prompt": "x", "seed": 3, **body}
        extra = {"structured_outputs": asked.pop("structured_outputs", None)}
        answer = await client.completions.create(**asked, extra_body=extra, stream=stream)
        if not stream:
            return answer.choices[0].text, answer.choices[0].finish_reason
        chunks = [chunk.choices[0] async for chunk in answer if chunk.choices]
        return "".join(one.text for one in chunks), chunks[-1].finish_reason

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            return await asyncio.gather(*(one(client, body) for body in bodies))

    return asyncio.run(all_of_them())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_output_is_valid(url, kind, stream):
    made = [random_form(random.Random(f"{kind} {number}"), kind) for number in range(NUM_CASES)]
    free = [{"max_tokens": 30, "seed": seed} for seed in range(3)]
    bodies = [
        {"structured_outputs": form, "temperature": index % 3, "seed": index}
        for index, (form, _) in enumerate(made)
    ]
    alone = outputs(url, free, stream=stream)
    found = outputs(url, [*free, *bodies], stream=stream)
    assert found[:3] == alone, "others change nothing"
    for (form, judge), (text, reason) in zip(made, found[3:], strict=True):
        assert reason == "stop", (form, text)
        assert judge(text), (form, text)


def test_the_formats_of_a_chat(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
    schema = random_schema(random.Random(2))
    named = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    for form, judge in [
        (named, judge_of_schema(schema)),
        ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
    ]:
        answer = client.chat.completions.create(
            model="structured",
            messages=[{"role": "user", "content": "hello"}],
            response_format=form,
            max_tokens=1500,
            temperature=0.5,
            seed=1,
        )
        choice = answer.choices[0]
        assert choice.finish_reason == "stop" or form["type"] == "json_object"
        assert choice.finish_reason == "length" or judge(choice.message.content)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(a|aa|aaa){500}b"}, "too many expressions"),
        ({"json": {"properties": {"a": {"not": {}}}}}, "not"),
    ],
)
def test_a_bad_grammar_is_status_400(url, form, says):
    with pytest.raises(openai.BadRequestError) as error:
        outputs(url, [{"structured_outputs": form}], stream=True)
    assert "structured_outputs" in str(error.value)
    assert says in str(error.value)
