"""A small OpenAI server whose answers are known, in this process or as ``api_server`` of vLLM."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Streams ``max_tokens`` events in chunks; some prompts make it fail, see ``_trouble``."""

    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer /health, /version and /v1/models."""
        known = {
            "/health": {},
            "/version": {"version": "9.8.7"},
            "/v1/models": {"data": [{"id": "stub"}]},
        }
        self._send(200, known.get(self.path, {}))

    def do_POST(self) -> None:
        """Stream an answer."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            self._send(401, {"error": {"message": "Invalid API key"}})
            return
        trouble = self._trouble(body)
        if trouble is None:
            self._stream(body, body["max_tokens"])

    def _trouble(self, body: dict[str, Any]) -> str | None:
        what = self.server.trouble.get(tuple(body["prompt"])[:1]) if "prompt" in body else None
        if what == "refuse":
            self._send(400, {"error": {"message": "the prompt is too long"}})
        elif what == "error":
            self._begin()
            self._chunk(f"data: {json.dumps({'error': {'message': 'the engine died'}})}\n\n")
            self._chunk("")
        elif what == "break":
            self._begin()
            self._chunk('data: {"choices": [{"text": "a"}]}\n\n')
            self.close_connection = True
        elif what == "short":
            self._stream(body, body["max_tokens"] - 1)
        elif what == "close":
            self.close_connection = True
        elif what == "exit":
            os._exit(7)
        return what

    def _stream(self, body: dict[str, Any], tokens: int) -> None:
        is_chat = "messages" in body
        usage = {"prompt_tokens": len(body.get("prompt", "abc")), "completion_tokens": tokens}
        self._begin()
        if is_chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for index in range(tokens):
            text = f'\ndata: {{"{index}'  # looks like an event, and is none
            one = {"delta": {"content": text}} if is_chat else {"text": text}
            self._event({"choices": [one], "usage": None})
        self._event({"choices": [], "usage": usage})
        self._chunk("data: [DONE]\n\n")
        self._chunk("")

    def _event(self, content: dict[str, Any]) -> None:
        text = f"data: {json.dumps(content)}\n\n"
        if self.server.split:  # each byte arrives alone
            data = f"{len(text):x}\r\n{text}\r\n".encode()
            for place in range(len(data)):
                self.wfile.write(data[place : place + 1])
                self.wfile.flush()
            return
        self._chunk(text)

    def _begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Stub(ThreadingHTTPServer):
    """``trouble``: the first token of a prompt -> what goes wrong. ``split``: bytes come alone."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.asked: list[tuple[str, str | None, dict[str, Any]]] = []
        self.trouble: dict[tuple[int, ...], str] = {}
        self.key, self.split = "", False
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def stub_server() -> Iterator[Stub]:
    """Serve in a thread."""
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main(arguments: list[str]) -> None:
    """Serve as vLLM's server does, until SIGTERM. FAKE_VLLM says what goes wrong, if anything."""
    print("INFO a line of the log", arguments, flush=True)
    how = os.environ.get("FAKE_VLLM", "")
    if how == "no start":
        raise RuntimeError("no such luck")
    server = Stub(int(arguments[arguments.index("--port") + 1]))
    if how == "exit":
        server.trouble = {(token,): "exit" for token in range(2000)}
    server.serve_forever()
