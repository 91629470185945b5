"""An engine that writes what a test says, and requests to a server in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from pathlib import Path

import httpx
import uvicorn
from one_life import OneLife
from scripted_engine import EOS, Writer

from kiln.engine.process.token_stream import TokenStream
from kiln.engine.requests.request import TokenOutput
from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings
from kiln.engine.text.replies.choice import choose_formats
from kiln.engine.text.tokenizer import Tokenizer

_TEMPLATE = Path(__file__).parents[1] / "engine/text/replies/templates/hermes.jinja"


def tokenizer_with_tools(folder):
    """Return a folder's tokenizer with a chat template that shows tools."""
    template = _TEMPLATE.read_text(encoding="utf-8")
    backend = Tokenizer.load(folder).backend
    return Tokenizer(backend, chat_templates={"default": template}, eos_ids=frozenset((EOS,)))


class OneByOne(TokenStream):
    """Receives the next item whenever it is read, so that none are merged."""

    def __init__(self, request_id, items):
        super().__init__([request_id], lambda names: None)
        self._items = iter(items)

    async def feed(self, take):
        def take_one(output):
            pauses = take(output)
            self._queue_next()
            return pauses

        if not self.has_waiting:
            self._queue_next()
        return await super().feed(take_one)

    def _queue_next(self):
        if (item := next(self._items, None)) is not None:
            self.queue(item)


class Scribe(Writer):
    """A Writer that answers one request after the other with the next of its texts.

    The last text answers all further requests. ``end`` may also be an exception that comes in place
    of a finish reason. ``cached`` tokens of each prompt were not computed.
    """

    def __init__(self, tokenizer, *texts, end="stop", cached=0):
        super().__init__(tokenizer, *texts, end=end)
        self.cached = cached

    def stream(self, *requests):
        (request,) = self.requests = requests
        reason = self.end if isinstance(self.end, str) else None
        text = self.ids.pop(0) if len(self.ids) > 1 else self.ids[0]
        ids = [*text, EOS] if reason == "stop" else text
        items = [
            TokenOutput(
                request.request_id,
                [token],
                reason if place == len(ids) - 1 else None,
                num_cached_tokens=self.cached if place == 0 else 0,
            )
            for place, token in enumerate(ids)
        ]
        return OneByOne(request.request_id, items if reason else [*items, self.end])


def app_of(scribe, tokenizer, parser="hermes", reasoning="qwen3", api_key=None):
    """Return the application of a server of this engine."""
    replies = choose_formats([], parser, reasoning)
    return create_app(
        OneLife(scribe), tokenizer, ServerSettings(("tiny",), api_key=api_key, replies=replies)
    )


@contextlib.contextmanager
def serving(app):
    """Serve an application on a port of its own, and yield its URL."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # so that a client may connect before the server runs
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def post(scribe, tokenizer, path, body, parser="hermes", reasoning="qwen3", headers=None):
    """POST a body to a server of this engine and return the response."""
    app = app_of(scribe, tokenizer, parser, reasoning)

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await http.post(path, json=body, headers=headers)

    return asyncio.run(send())


def named_events(text):
    """Return the data of events, each of which has its type as its name."""
    events = [event.split("\n") for event in text.removesuffix("\n\n").split("\n\n")]
    data = [json.loads(line.removeprefix("data: ")) for _, line in events]
    assert [name for name, _ in events] == [f"event: {one['type']}" for one in data]
    return data
