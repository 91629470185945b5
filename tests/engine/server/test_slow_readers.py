"""A reader that lags gets fewer and larger events; nothing is lost, and no other stream waits."""

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from one_life import OneLife

from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.token_stream import MAX_WAITING_TOKENS, TokenStream
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.request import TokenLogprobs, TokenOutput
from kiln.engine.server.app import create_app
from kiln.engine.server.connection import Connection
from kiln.engine.server.serving import ServerSettings

TOKENS = 600
BUFFER = 4096  # bytes of a socket, where the kernel would allow megabytes
HIGH_WATER = 65536  # bytes in a connection's write buffer from which on asyncio stops the writer
LOW_WATER = HIGH_WATER // 4  # down to which it stays stopped, whatever the kernel takes meanwhile
BODY = {
    "messages": [{"role": "user", "content": "Hi"}],
    "stream": True,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}


class Engine:
    """An EngineClient whose streams get a token each whenever the test says so."""

    is_ready = is_alive = True

    def __init__(self, ids):
        self.model_info = ModelInfo(10**6, 400, "float32", "cpu")
        self.adapters = AdapterCalls(lambda message: None)
        self.streams = {}
        self.aborted = []
        self.ids = ids

    def stats(self):
        return {}

    def stream(self, request):
        name = request.request_id
        self.streams[name] = TokenStream([name], self.aborted.extend)
        return self.streams[name]

    def step(self, number, last=False):
        token = self.ids[number % len(self.ids)]
        logprobs = [TokenLogprobs(token, -1.0, 1, [(token, -1.0, 1), (5, -2.0, 2)])]
        for name, stream in self.streams.items():
            seed = 1 if number == 0 else None
            reason = "length" if last else None
            stream.queue(TokenOutput(name, [token], reason, logprobs=logprobs, seed=seed))
        for stream in self.streams.values():
            stream.wake()


class Client:
    """Reads the events of one stream, and counts them."""

    def __init__(self, address):
        self.address = address
        self.events = []
        self.arrived = asyncio.Event()

    async def begin(self, body, version="1.1"):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        self.reader, self.writer = await asyncio.open_connection(sock=sock, limit=2**24)
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/chat/completions HTTP/{version}\r\nHost: x\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data)

    async def read(self):
        """Read to the end of the stream."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        chunked = b"transfer-encoding: chunked" in head.lower()
        data, done = b"", False
        while not done:
            if chunked:
                size = int(await self.reader.readline(), 16)
                data += (await self.reader.readexactly(size + 2))[:-2]
            else:
                data += await self.reader.readuntil(b"\n\n")
            *events, data = data.split(b"\n\n")
            done = b"data: [DONE]" in events
            self.events += [json.loads(one[6:]) for one in events if one != b"data: [DONE]"]
            self.arrived.set()
        if chunked:
            assert await self.reader.readexactly(5) == b"0\r\n\r\n"

    async def until(self, count):
        while len(self.events) < count:
            self.arrived.clear()
            await self.arrived.wait()

    @property
    def choices(self):
        return [one["choices"][0] for one in self.events if one.get("choices")]

    @property
    def told(self):
        """The text, the tokens and their log-probabilities of the whole stream."""
        lists = [one["logprobs"]["content"] for one in self.choices if one["logprobs"]]
        return (
            "".join(one["delta"].get("content", "") for one in self.choices),
            [token for one in self.choices for token in one["token_ids"]],
            [entry for entries in lists for entry in entries],
            [one["finish_reason"] for one in self.choices if one["finish_reason"]],
            self.events[-1].get("usage"),
        )


@contextlib.asynccontextmanager
async def serving(tokenizer, text="Größe 日本 and so on "):
    engine = Engine(tokenizer.encode(text, add_special_tokens=False))
    app = create_app(OneLife(engine), tokenizer, ServerSettings(("tiny",)))
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=Connection, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        async with asyncio.timeout(60):
            yield engine, lambda: Client(listener.getsockname()), server
    finally:
        server.should_exit = server.force_exit = True
        await task


async def begun(engine, clients):
    """Wait until the engine has the requests of all clients."""
    while len(engine.streams) < len(clients):
        await asyncio.sleep(0.01)


def test_a_reader_that_lags_gets_joined_events_and_others_each_token(tokenizer):
    async def test():
        async with serving(tokenizer) as (engine, connect, _):
            fast, slow = connect(), connect()
            for client in (fast, slow):
                await client.begin(BODY)
            slow.writer.transport.pause_reading()
            await begun(engine, (fast, slow))
            reading = asyncio.create_task(fast.read())
            for number in range(TOKENS):
                engine.step(number, last=number == TOKENS - 1)
                await fast.until(number + 2)  # the first has the role
            await reading
            slow.writer.transport.resume_reading()
            await slow.read()
            assert slow.told == fast.told
            assert slow.told[1] == [engine.ids[i % len(engine.ids)] for i in range(TOKENS)]
            assert len(fast.choices) == TOKENS + 1
            assert len(slow.choices) < TOKENS / 2
            assert not engine.aborted
            for client in (fast, slow):
                client.writer.close()

    asyncio.run(test())


def test_what_waits_for_a_reader_that_stalls_is_bounded_and_then_its_request_ends(tokenizer):
    async def test():
        async with serving(tokenizer) as (engine, connect, server):
            fast, stalled = connect(), connect()
            await stalled.begin(BODY)
            stalled.writer.transport.pause_reading()
            await begun(engine, (stalled,))
            [name] = engine.streams
            await fast.begin(BODY)
            await begun(engine, (fast, stalled))
            reading = asyncio.create_task(fast.read())
            most = 0
            for number in range(2 * MAX_WAITING_TOKENS):
                engine.step(number, last=number == 2 * MAX_WAITING_TOKENS - 1)
                await fast.until(number + 2)
                waiting = engine.streams[name]._waiting.values()
                assert sum(len(one.token_ids) for one in waiting) <= MAX_WAITING_TOKENS
                held = [
                    c.transport.get_write_buffer_size() for c in server.server_state.connections
                ]
                most = max(most, *held)
            assert LOW_WATER < most < 2 * HIGH_WATER
            assert engine.aborted == [name]
            await reading
            stalled.writer.transport.resume_reading()
            await stalled.read()
            assert "unread" in stalled.events[-1]["error"]["message"]
            assert len(fast.choices) == 2 * MAX_WAITING_TOKENS + 1
            for client in (fast, stalled):
                client.writer.close()

    asyncio.run(test())


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_stream_ends_as_its_version_of_http_says(tokenizer, version):
    async def test():
        async with serving(tokenizer) as (engine, connect, _):
            client = connect()
            await client.begin(BODY, version)
            await begun(engine, (client,))
            reading = asyncio.create_task(client.read())
            for number in range(3):
                engine.step(number, last=number == 2)
                await asyncio.sleep(0)
            await reading
            assert client.told[1] == engine.ids[:3]
            if version == "1.0":
                assert await client.reader.read() == b""
            else:  # the connection serves another request
                client.writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
                assert (await client.reader.readline()).startswith(b"HTTP/1.1 200 ")
            client.writer.close()

    asyncio.run(test())
