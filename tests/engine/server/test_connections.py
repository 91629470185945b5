"""A client that is late at anything loses its connection; one that is only slow does not."""

import asyncio
import contextlib
import json
import socket
import ssl
from types import SimpleNamespace

import pytest
import uvicorn
from certificates import make_certificate
from one_life import OneLife

from kiln.engine.server.app import create_app
from kiln.engine.server.connection import Connection
from kiln.engine.server.middleware import Limits
from kiln.engine.server.serving import ServerSettings
from kiln.engine.server.tls import TlsSettings

SHORT = 0.3  # seconds that a client may take here
LARGE = 32 * 2**20  # bytes: more than the buffers of both sockets hold


class Impatient(Connection):
    header_seconds = body_seconds = write_seconds = SHORT
    contexts = (None, None)  # of TLS: the server's and the client's


class Loading:
    """An EngineClient before the engine is ready."""

    is_ready, is_alive = False, True

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


@pytest.fixture(autouse=True, params=["http", pytest.param("https", marks=pytest.mark.deep)])
def secure(request, tmp_path, monkeypatch):
    """Run a test again over TLS, which has buffers and an end of its own."""
    if request.param == "https":
        made = make_certificate(tmp_path)
        trust = ssl.create_default_context(cafile=made.cert)
        contexts = (TlsSettings(made.cert, made.key).context(), trust)
        monkeypatch.setattr(Impatient, "contexts", contexts)


async def serve(app, test, keep_alive):
    """Run ``test(connect)`` against uvicorn in this loop, on a port of its own."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        http=Impatient,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=keep_alive,
    )
    config.load()
    config.ssl, trust = Impatient.contexts
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(30):
            place = listener.getsockname()
            await test(lambda: asyncio.open_connection(*place, limit=2**20, ssl=trust))
    finally:
        server.should_exit = server.force_exit = True
        await task


def run(app, test, keep_alive=1):
    asyncio.run(serve(app, test, keep_alive))


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
    app = create_app(OneLife(Loading()), None, ServerSettings(("tiny",)))

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
    app = create_app(OneLife(Loading()), None, ServerSettings(("tiny",)))

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


def test_a_client_that_reads_slowly_gets_all_of_it(monkeypatch):
    limit = 3.0  # seconds: no pause of a busy machine takes as long
    monkeypatch.setattr(Impatient, "write_seconds", limit)
    app = App(LARGE)

    async def test(connect):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        size, begun = 0, asyncio.get_running_loop().time()
        while data := await reader.read(LARGE // 16):
            size += len(data)
            await asyncio.sleep(limit / 12)
        assert size > LARGE
        assert asyncio.get_running_loop().time() - begun > limit

    run(app, test)


@pytest.mark.parametrize(("reads", "aborted"), [(True, False), (False, True)])
def test_a_buffer_that_is_as_full_as_before_says_nothing_of_what_was_read(reads, aborted):
    """The server may have emptied and filled it since it was looked at."""
    checks, ended = [], []
    made = Impatient.__new__(Impatient)
    made._writing, made._unsent, made._was_read = None, 0, False
    made.loop = SimpleNamespace(call_later=lambda seconds, check: checks.append(check) or check)
    made.flow = SimpleNamespace(pause_writing=lambda: None, resume_writing=lambda: None)
    made.transport = SimpleNamespace(
        get_write_buffer_size=lambda: 100_000, abort=lambda: ended.append("aborted")
    )
    made.pause_writing()
    if reads:
        made.resume_writing()
        made.pause_writing()
    checks.pop()()
    assert bool(ended) == aborted
    if not aborted:  # and it is looked at again
        checks.pop()()
        assert ended == ["aborted"]


def test_requests_on_one_connection_each_have_their_time():
    async def test(connect):
        reader, writer = await connect()
        for _ in range(5):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\nxx")
            await asyncio.sleep(SHORT / 3)
        writer.close()

    run(App(), test)


def test_a_connection_may_idle_longer_than_headers_may_take():
    async def test(connect):
        reader, writer = await connect()
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\nxx")
            await asyncio.sleep(2 * SHORT)
        writer.write(b"GET / HTT")  # from its first byte on, a request has its own time
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()

    run(App(), test, keep_alive=25)


def test_a_connection_is_closed_after_the_keep_alive_time(monkeypatch):
    monkeypatch.setattr(Impatient, "header_seconds", 25)

    async def test(connect):
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nxx")
        assert await reader.read() == b""
        writer.close()

    run(App(), test, keep_alive=0.1)
