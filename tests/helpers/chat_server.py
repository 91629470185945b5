"""A server with the two routes of OpenAI's API that a chat needs, whose answers are scripted."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODELS = ("base", "adapter")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, {"data": [{"id": name} for name in self.server.models]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        question = body["messages"][-1]["content"]
        if question == "refuse":
            return self._send(400, {"error": {"message": "not\n  that"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        try:
            self._answer(question, body["model"])
        except OSError:
            self.server.left.set()
        self.close_connection = True
        return None

    def _answer(self, question, model):
        if question == "think":
            self._event({"reasoning_content": "let me"})
            self._event({"reasoning": " see"})
        if question == "odd":
            return self._write("data: <html>\n\n")
        if question == "late":
            self._event({"content": "some"})
            return self._write('data: {"error": {"message": "out of luck"}}\n\n')
        self._event({"content": f"{model} heard "})
        if question == "slow":
            while not self.server.over.wait(0.02):
                self._event({"content": "."})
            return None
        if question == "break":
            return None
        self._event({"content": question}, "length" if question == "long" else "stop")
        return self._write("data: [DONE]\n\n")

    def _event(self, delta, reason=None):
        chunk = {"choices": [{"delta": delta, "finish_reason": reason}]}
        self._write(f"data: {json.dumps(chunk)}\n\n")

    def _write(self, text):
        self.wfile.write(text.encode())
        self.wfile.flush()

    def _send(self, code, content):
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def chat_server(models=MODELS):
    """Serve on a free port; yield the server, with its ``url`` and what it was ``asked``.

    Its answer says which model heard what. ``left`` is set when a client leaves a slow answer.
    Some questions have answers of their own: see ``_answer``.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.models, server.asked = list(models), []
        server.left, server.over = threading.Event(), threading.Event()
        server.url = f"127.0.0.1:{server.server_address[1]}"  # without a scheme
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()
