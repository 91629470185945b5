"""``kiln chat`` against a server that is not Kiln."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kiln.engine.distributed.command import module_command

ANSWER = "one\u2028two\u0085three"
KEY = "s3cret"


class Handler(BaseHTTPRequestHandler):
    """Lists a model, and streams an answer with raw line separators of Unicode."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send("application/json", json.dumps({"data": [{"id": "other"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.send_error(401)
        usage = {"completion_tokens": 1, "prompt_tokens": 2}
        choice = {"delta": {"content": ANSWER}, "text": ANSWER}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(one, ensure_ascii=False)}\n\n" for one in events]
        return self._send("text/event-stream", "".join(lines) + "data: [DONE]\n\n")

    def _send(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def other():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    server.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_shows_line_separators_of_unicode_and_has_commands(kiln, other):
    said = kiln("chat", "--url", other.url, "--api-key", KEY, stdin="hi\n/help\n/hepl\n/usr/bin?\n")
    assert said.returncode == 0, said.stderr
    assert said.stdout.count(ANSWER) == 2
    assert "/reset" in said.stdout
    assert said.stderr == "error: /hepl is no command; did you mean /help?\n"
    sent = [one["content"] for one in other.asked[-1][2]["messages"] if one["role"] == "user"]
    assert sent == ["hi", "/usr/bin?"]


def test_ctrl_c_twice_at_the_prompt_ends_with_a_line_break(other):
    primary, secondary = pty.openpty()
    command = [*module_command("kiln.engine.cli.main"), "chat", "--url", other.url]
    with subprocess.Popen(
        [*command, "--api-key", KEY, "--no-history"],
        stdin=secondary,
        stdout=secondary,
        stderr=secondary,
        start_new_session=True,
        preexec_fn=lambda: _own_terminal(secondary),
    ) as chat:
        try:
            os.close(secondary)
            _read_until(primary, b"> ")
            os.write(primary, b"hx\x08i\n")  # the line is edited before it is sent
            _read_until(primary, b"three\r\n\r\n> ")
            assert _interrupted(chat, primary) == 0
            rest = _read_until(primary, None)
        finally:
            chat.kill()
    os.close(primary)
    assert rest.endswith(b"\n")
    assert other.asked[-1][2]["messages"][-1]["content"] == "hi"


def _own_terminal(number):
    import fcntl
    import termios

    fcntl.ioctl(number, termios.TIOCSCTTY, 0)
    # A shell that starts the tests in the background ignores Ctrl-C, and so do all it starts.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupted(process, number):
    """The exit code of a process whose user presses Ctrl-C until it ends.

    Python's prompt misses a signal that comes just before it begins to wait for a key.
    """
    for _ in range(100):
        os.write(number, b"\x03")
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(0.5)
    raise AssertionError("it still runs")


def _read_until(number, end):
    """What a terminal shows up to some bytes; to the end without any."""
    shown = b""
    while end is None or end not in re.sub(rb"\x1b\[[0-9;?]*[a-z]", b"", shown):
        assert select.select([number], [], [], 60)[0], shown
        try:
            data = os.read(number, 1024)
        except OSError:  # the other side is closed
            data = b""
        if not data:
            assert end is None, shown
            return shown
        shown += data
    return shown
