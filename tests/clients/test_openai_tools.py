"""The real openai client with tools: an agent that makes two calls and sends their results back."""

from __future__ import annotations

import asyncio
import json

import httpx
import openai
import pytest
from one_life import OneLife
from reply_texts import FORMATS, NOW, TOOLS, WEATHER
from scripted_engine import Writer

from kiln.engine.cli.options import DEMO_FOLDER
from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings
from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.tokenizer import Tokenizer

HERMES = FORMATS[0]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}"
    "<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}{{ m.tool_call_id }}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer.load(DEMO_FOLDER).backend
    return Tokenizer(backend, chat_templates={"default": TEMPLATE})


async def ask(tokenizer, text, messages, streamed):
    """One turn: the reply as a message, its finish reason, and the prompt that the engine got."""
    writer = Writer(tokenizer, text)
    settings = ServerSettings(("tiny",), replies=choose_formats([TEMPLATE]))
    transport = httpx.ASGITransport(create_app(OneLife(writer), tokenizer, settings))
    async with openai.AsyncOpenAI(
        base_url="http://x/v1",
        api_key="none",
        max_retries=0,
        http_client=httpx.AsyncClient(transport=transport),
    ) as client:
        options = {"model": "tiny", "messages": messages, "tools": TOOLS}
        if streamed:
            async with client.chat.completions.stream(**options) as stream:
                async for _ in stream:
                    pass
                answer = await stream.get_final_completion()
        else:
            answer = await client.chat.completions.create(**options)
    prompt = tokenizer.decode(list(writer.requests[0].prompt_token_ids))
    return answer.choices[0].message, answer.choices[0].finish_reason, prompt


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_makes_two_calls_and_sends_their_results_back(tokenizer, streamed):
    async def talk():
        messages = [{"role": "user", "content": "What is the weather?"}]
        text = HERMES.write([WEATHER, NOW])
        reply, reason, _ = await ask(tokenizer, text, messages, streamed)
        assert (reason, reply.content or None) == ("tool_calls", None)
        found = [
            (one.function.name, json.loads(one.function.arguments)) for one in reply.tool_calls
        ]
        assert found == [WEATHER, NOW]
        results = [
            {"role": "tool", "tool_call_id": one.id, "content": "fine"} for one in reply.tool_calls
        ]
        sent = reply.to_dict()
        for call in sent["tool_calls"]:
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        sent.pop("parsed", None)
        messages += [sent, *results]
        reply, reason, prompt = await ask(tokenizer, "It is fine.", messages, streamed)
        assert (reason, reply.content, reply.tool_calls) == ("stop", "It is fine.", None)
        assert '{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3' in prompt
        assert all(f"<tool>fine{one['tool_call_id']}" in prompt for one in results)

    asyncio.run(talk())
