"""Requests for embeddings when the engine dies, the client leaves, or the queue is full."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from one_life import OneLife

from kiln.engine.errors import EngineDeadError, QueueFullError
from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.pooling import Embedder
from kiln.engine.requests.request import TokenOutput
from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings

MANY = {"input": [[5, 6]] * 300}
SIZE = 4


class Embeds:
    """An EngineClient whose requests end with ``error``, or wait for ``finish``."""

    def __init__(self, error=None):
        self.error = error
        self.is_ready = self.is_alive = True
        self.adapters = AdapterCalls(lambda message: None)
        self.model_info = ModelInfo(128, 400, "float32", "cpu", embedder=Embedder(SIZE))
        self.open, self.aborted, self.most = {}, [], 0

    def stats(self):
        return {}

    def stream(self, *requests):
        names = [request.request_id for request in requests]
        stream = TokenStream(names, self.aborted.extend)
        if self.error is not None:
            stream.put(self.error)
        self.open |= dict.fromkeys(names, stream)
        self.most = max(self.most, len(self.open))
        return stream

    def finish(self):
        """End half of the requests that are open."""
        for name in list(self.open)[: len(self.open) // 2 + 1]:
            output = TokenOutput(name, [], "stop", embedding=bytes(4 * SIZE))
            self.open.pop(name).put(output)


def app_of(client):
    return create_app(OneLife(client), None, ServerSettings(("tiny",)))


async def post(client, body):
    transport = httpx.ASGITransport(app_of(client), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
        return await http.post("/v1/embeddings", json=body)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDeadError("killed by signal 9"), "engine_unavailable"),
        (QueueFullError("the queue holds at most 4"), "queue_full"),
    ],
)
def test_an_error_of_the_engine_has_its_own_status(error, code):
    answer = asyncio.run(post(Embeds(error), MANY))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, code)
    assert answer.headers["retry-after"]


def test_the_engine_gets_128_requests_of_a_call_at_a_time():
    async def run():
        client = Embeds()
        answer = asyncio.create_task(post(client, MANY))
        while not answer.done():
            client.finish()
            await asyncio.sleep(0.001)
        return client, answer.result()

    client, answer = asyncio.run(run())
    assert [item["index"] for item in answer.json()["data"]] == list(range(300))
    assert client.most == 128
    assert answer.json()["data"][0]["embedding"] == [0.0] * SIZE  # of a vector without a length


def test_a_client_that_leaves_aborts_what_is_open():
    async def run():
        client, sent = Embeds(), []
        messages = [{"type": "http.request", "body": json.dumps(MANY).encode()}]

        async def receive():
            if messages:
                return messages.pop()
            while not client.open:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/embeddings", "headers": headers}
        scope |= {"query_string": b"", "raw_path": b"/v1/embeddings", "scheme": "http"}
        await app_of(client)(scope, receive, send)
        return client, sent

    client, sent = asyncio.run(run())
    assert sent[0]["status"] == 499
    assert sorted(client.aborted) == sorted(client.open)
    assert len(client.aborted) == 128
