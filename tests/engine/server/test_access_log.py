"""The access log has one line for each request, and nothing in it that the client wants kept."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from one_life import OneLife
from two_tokens import TwoTokens

from kiln.engine.server.app import create_app
from kiln.engine.server.body_writer import offer_writer
from kiln.engine.server.serving import ServerSettings

KEY = "s3cret"
COMPLETIONS = "/v1/completions"
BODY = {"prompt": [5, 6], "max_tokens": 3, "user": "me"}


@pytest.fixture
def logged(caplog):
    """Send a request; return the answer, and the records of the access log."""
    caplog.set_level(logging.INFO, logger="kiln")

    def send(method="POST", path=COMPLETIONS, client=None, quiet=(), **options):
        app = create_app(
            OneLife(client or TwoTokens()),
            None,
            ServerSettings(("tiny",), api_key=KEY, quiet_paths=quiet),
        )
        headers = {"x-api-key": KEY, "X-Request-Id": "r-7", **options.pop("headers", {})}

        async def ask():
            transport = httpx.ASGITransport(app, client=("10.1.2.3", 4567))
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                return await http.request(method, path, headers=headers, **options)

        caplog.clear()
        answer = asyncio.run(ask())
        return answer, [one for one in caplog.records if one.name.startswith("kiln.engine.server")]

    return send


@pytest.mark.parametrize("streams", [False, True])
def test_a_line_says_who_asked_what_was_done_and_how_long_it_took(logged, streams):
    answer, (record,) = logged(json={**BODY, "stream": streams})
    assert record.levelno == logging.INFO
    fields = record.fields
    seconds, first = fields.pop("seconds"), fields.pop("first_byte_seconds")
    assert 0 < first <= seconds
    assert fields == {
        "client": "10.1.2.3:4567",
        "method": "POST",
        "path": COMPLETIONS,
        "status": 200,
        "bytes": len(answer.content),
        "request_id": "r-7",
        "model": "tiny",
        "prompt_tokens": 2,
        "output_tokens": 2,
        "user": "me",
    }
    line = record.getMessage()
    assert line.startswith(f'10.1.2.3:4567 - "POST {COMPLETIONS}" 200 bytes={len(answer.content)} ')
    assert line.endswith(" request_id=r-7 model=tiny prompt_tokens=2 output_tokens=2 user=me")


def test_a_request_that_ends_badly_has_its_reason_in_the_same_line(logged):
    for sent, status, level, reason in (
        ({"json": {**BODY, "n": 0}}, 400, logging.WARNING, "n"),
        ({"json": BODY, "headers": {"x-api-key": "no"}}, 401, logging.WARNING, "API key"),
        ({"json": BODY, "client": TwoTokens(("error", "NaN"))}, 500, logging.ERROR, "NaN"),
    ):
        answer, (record,) = logged(**sent)
        assert (answer.status_code, record.fields["status"]) == (status, status)
        assert record.levelno == level
        assert reason in record.fields["error"]
        assert "error=" in record.getMessage()
    failing = TwoTokens(("error", "NaN"))
    answer, (record,) = logged(client=failing, json={**BODY, "stream": True})
    assert (answer.status_code, record.fields["status"]) == (200, 500)
    assert record.fields["output_tokens"] == 1


def test_prompts_keys_and_query_strings_are_never_logged(logged):
    body = {"prompt": "hidden words", "max_tokens": 1}
    for path in (f"{COMPLETIONS}?api_key=hidden", "/metrics?token=hidden", "/hidden-not"):
        _, (record,) = logged(path=path, json=body, headers={"Cookie": "hidden"})
        shown = record.getMessage().replace("/hidden-not", "") + str(
            {name: value for name, value in record.fields.items() if name not in ("path", "error")}
        )
        assert "hidden" not in shown
        assert KEY not in shown


def test_a_line_cannot_be_forged(logged):
    _, (record,) = logged(json={**BODY, "user": "me\nINFO forged"})
    assert "user='me\\\\nINFO forged'" in record.getMessage()
    _, (record,) = logged("GET", "/v1/%0aINFO%20forged")
    assert "\n" not in record.getMessage()


def test_paths_can_be_left_out_unless_they_end_badly(logged):
    assert logged("GET", "/health", quiet=("/health",))[1] == []
    assert len(logged("GET", "/health", quiet=())[1]) == 1
    stand_in = TwoTokens()
    stand_in.is_alive = False
    assert len(logged("GET", "/health", client=stand_in, quiet=("/health",))[1]) == 1


class Writer:
    """What a connection offers: events go past ASGI's ``send``."""

    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data
        return False

    async def drain(self):
        return None


@pytest.mark.parametrize("quiet", [(), None])
def test_events_that_go_past_the_middleware_are_counted_too(caplog, quiet):
    caplog.set_level(logging.INFO, logger="kiln")
    app = create_app(OneLife(TwoTokens()), None, ServerSettings(("tiny",), quiet_paths=quiet))
    writer, ended = Writer(), asyncio.Event()
    body = b'{"prompt": [5], "max_tokens": 3, "stream": true}'
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": headers}
    scope |= {"raw_path": b"", "query_string": b"", "root_path": ""}
    offer_writer(scope, writer)

    async def receive():
        if messages:
            return messages.pop()
        await ended.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        assert not message.get("body")

    asyncio.run(app(scope, receive, send))
    assert writer.data.endswith(b"data: [DONE]\n\n")
    lines = [one.fields["bytes"] for one in caplog.records if "access_log" in one.name]
    assert lines == ([] if quiet is None else [len(writer.data)])
