"""Whatever body is sent to a route, the answer is no 5xx and takes little of the processor.

The application runs in this process, so that the time of its own processor is what is measured:
how busy the machine is does not matter. Only the engine, which answers at once, is another process.
"""

from __future__ import annotations

import asyncio
import json
import random
import time

import agent_engine
import agent_model
import httpx
import pytest
from depth import at_depth
from mutations import mutated
from one_life import OneLife
from route_bodies import BODIES

from kiln.engine.config import EngineConfig, ModelConfig
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient
from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings
from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.tokenizer import Tokenizer

NUM_BODIES = at_depth(60, 10_000)  # for each route
MOST_SECONDS = 1.0  # of this process's processor, for one request
MOST_TOKENS = 80  # in one output
MOST_FAILURES = 5  # then it stops
HEADERS = {"Content-Type": "application/json"}
WITHOUT_BODY = {"/ping", "/reset_prefix_cache", "/v1/responses/{response_id}/cancel"}
# What they ask for is not there: a folder of adapters, a response that was kept.
REFUSED = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", *WITHOUT_BODY}
REFUSED -= {"/ping", "/reset_prefix_cache"}
TASKS = {"/v1/embeddings": "embed"}  # of routes that need another than to generate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    agent_model.write_folder(folder)
    return folder


async def _with_app(folder, use, task="generate"):
    """Call ``use(http, app)`` with the application of an engine that answers at once."""
    config = EngineConfig(ModelConfig(str(folder), task=task))
    process = EngineProcess.spawn(config, agent_engine.engine_command(MOST_TOKENS))
    async with EngineClient(process) as client:
        await client.wait_ready()
        replies = choose_formats([agent_model.TEMPLATE])
        settings = ServerSettings(("tiny",), replies=replies)
        app = create_app(OneLife(client), Tokenizer.load(folder), settings)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            await use(http, app)
        assert len(client._streams) == 0


def _fields(app, path):
    """The fields that a route's documented body has."""
    document = app.openapi()
    operation = document["paths"][path]["post"]
    if "requestBody" not in operation:
        return ["unknown"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    name = schema["$ref"].rpartition("/")[2]
    return [*document["components"]["schemas"][name]["properties"], "unknown"]


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_every_route_has_good_bodies(folder, task):
    async def check(http, app):
        paths = {path for path, methods in app.openapi()["paths"].items() if "post" in methods}
        assert paths == set(BODIES), "give the route bodies in tests/helpers/route_bodies.py"
        undocumented = {path for path in paths if _fields(app, path) == ["unknown"]}
        assert undocumented == WITHOUT_BODY, "a route whose body is not documented"
        for path in (one for one in paths if TASKS.get(one, "generate") == task):
            for body in BODIES[path]:
                answer = await http.post(path, json=body)
                assert (answer.status_code == 200) != (path in REFUSED), (path, answer.text)

    asyncio.run(_with_app(folder, check, task))


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("path", BODIES)
def test_no_mutated_body_is_a_5xx_or_takes_long(folder, path):
    async def check(http, app):
        failures, fields = [], _fields(app, path)
        for number in range(NUM_BODIES):
            data = mutated(random.Random(f"{path} {number}"), BODIES[path], fields)
            answer, seconds = await _timed_post(http, path, data)
            for _ in range(2):  # a collection of the tests' garbage may have come in between
                if seconds > MOST_SECONDS:
                    answer, again = await _timed_post(http, path, data)
                    seconds = min(seconds, again)
            wrong = _what_is_wrong(answer, seconds)
            if wrong:
                failures.append(f"{number}: {wrong}\n    {data[:2000]!r}")
            if len(failures) >= MOST_FAILURES:
                break
        assert not failures, "\n".join(failures)

    asyncio.run(_with_app(folder, check, TASKS.get(path, "generate")))


async def _timed_post(http, path, data):
    """Return the answer to a body, and the seconds of the processor that it took."""
    begun = time.process_time()
    answer = await http.post(path, content=data, headers=HEADERS)
    return answer, time.process_time() - begun


def _what_is_wrong(answer, seconds):
    """Say what must not be, or return None."""
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:300]}"
    if seconds > MOST_SECONDS:
        return f"took {seconds:.1f} s"
    if answer.status_code == 200:
        broken = any(b'"error"' in line[:40] for line in answer.content.split(b"\n"))
        return f"an error in a stream: {answer.text[-500:]}" if broken else None
    try:
        error = json.loads(answer.content)["error"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code} without an error object: {answer.text[:300]}"
    message = error["message"]
    if not 0 < len(message) <= 600 or message.count("\n") > 1 or ".py" in message:
        return f"{answer.status_code} with the message {message[:700]!r}"
    return None
