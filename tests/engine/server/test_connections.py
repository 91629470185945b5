"""A client that is late at anything loses its connection; one that is only slow does not."""

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn

from kiln.engine.server.app import create_app
from kiln.engine.server.connection import Connection
from kiln.engine.server.middleware import Limits
from kiln.engine.server.serving import ServerSettings

SHORT = 0.3  # seconds that a client may take here
LARGE = 32 * 2**20  # bytes: more than the buffers of both sockets hold


class Impatient(Connection):
    header_seconds = body_seconds = write_seconds = SHORT


class Loading:
    """An EngineClient before the engine is ready."""

    is_ready, is_alive, seconds_without_progress = False, True, 0.0

    def stats(self):
        return {}


class App:
    """Reads a body, answers with ``size`` bytes in pieces, and tells how the request ended."""

    def __init__(self, size=2):
        self.size = size
        self.ended = []

    async def __call__(self, scope, receive, send):
        with contextlib.suppress(asyncio.CancelledError):
            while (await receive()).get("more_body"):
                pass
            headers = [(b"content-length", str(self.size).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            left = self.size
            while left:
                piece = min(left, 65536)
                left -= piece
                body = {"type": "http.response.body", "body": b"x" * piece, "more_body": left > 0}
                await send(body)
            self.ended.append((await receive())["type"])


async def serve(app, test):
    """Run ``test(connect)`` against uvicorn in this loop, on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http=Impatient, ws="none", lifespan="off", log_config=None, timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(30):
            await test(lambda: asyncio.open_connection(*listener.getsockname(), limit=2**20))
    finally:
        server.should_exit = server.force_exit = True
        await task


def run(app, test):
    asyncio.run(serve(app, test))


async def drip(writer, data):
    for byte in data:
        writer.write(bytes([byte]))
        await asyncio.sleep(SHORT / 5)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "answered"), [(b"", False), (b"GET /version HT", True), (HEAD, True)]
)
def test_a_client_without_all_of_its_headers_is_closed(sent, answered):
    async def test(connect):
        reader, writer = await connect()
        writer.write(sent)
        answer = await reader.read()  # to the end: the server closes
        assert answer.startswith(b"HTTP/1.1 408 ") == answered
        if answered:
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "timeout"
        writer.close()

    run(App(), test)


def test_headers_in_drops_are_no_reason_to_wait():
    async def test(connect):
        reader, writer = await connect()

        task = asyncio.create_task(drip(writer, HEAD))
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        task.cancel()

    run(App(), test)


def test_a_client_without_all_of_its_body_is_told_and_closed():
    app = create_app(Loading(), None, ServerSettings("tiny"))

    async def test(connect):
        reader, writer = await connect()
        writer.write(HEAD + b'Content-Length: 1000\r\n\r\n{"prompt"')
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ")
        error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert "body" in error["message"]

    limits = next(item for item in app.user_middleware if item.cls is Limits)
    limits.kwargs["body_seconds"] = SHORT
    run(app, test)


def test_a_body_that_nobody_reads_and_nobody_ends_is_cut_off(monkeypatch):
    monkeypatch.setattr("kiln.engine.server.connection._GRACE", 0)
    app = create_app(Loading(), None, ServerSettings("tiny"))

    async def test(connect):
        reader, writer = await connect()
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
        task = asyncio.create_task(drip(writer, b"x" * 1000))
        with contextlib.suppress(ConnectionResetError):
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
        assert not task.done()
        task.cancel()

    run(app, test)


def test_a_client_that_never_reads_ends_its_request():
    app = App(LARGE)

    async def test(connect):
        reader, writer = await connect()
        reader._transport.pause_reading()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while not app.ended:
            await asyncio.sleep(0.02)
        writer.transport.abort()

    run(app, test)
    assert app.ended == ["http.disconnect"]


def test_a_client_that_reads_slowly_gets_all_of_it():
    app = App(LARGE)

    async def test(connect):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size = 0
        while data := await reader.read(LARGE // 16):
            size += len(data)
            await asyncio.sleep(SHORT / 20)
        assert size > LARGE

    run(app, test)


def test_requests_on_one_connection_each_have_their_time():
    async def test(connect):
        reader, writer = await connect()
        for _ in range(5):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\nxx")
            await asyncio.sleep(SHORT / 3)
        writer.close()

    run(App(), test)
