"""Browsers, probes and the log: what surrounds every request, in this process."""

from __future__ import annotations

import asyncio
import json
import logging
import re

import httpx
import pytest
from metric_lines import value
from one_life import OneLife
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kiln.engine.process.adapter_calls import AdapterCalls
from kiln.engine.process.token_stream import TokenStream
from kiln.engine.process.wire import ModelInfo
from kiln.engine.requests.request import TokenOutput
from kiln.engine.server.app import create_app
from kiln.engine.server.engine_counts import ENGINE_ROWS
from kiln.engine.server.metrics import VLLM_NAMES, Metrics
from kiln.engine.server.serving import ServerSettings
from kiln.engine.server.sse import event

KEY = "s3cret-ключ"
PAGE = "https://page.example"
COMPLETIONS = "/v1/completions"
BODY = {"prompt": [5], "max_tokens": 3}


class StandIn:
    """An EngineClient that answers each request with what ``script`` yields."""

    is_ready = is_alive = True

    def __init__(self):
        self.model_info = ModelInfo(64, 400, "float32", "cpu")
        self.adapters = AdapterCalls(lambda message: None)
        self.counts = {}

    def stats(self):
        return self.counts

    def stream(self, *new):
        stream = TokenStream([one.request_id for one in new], lambda ids: None)
        for one in new:
            stream.put(TokenOutput(one.request_id, [7], seed=1, queue_seconds=0.25))
            for output in self.script(one.request_id):  # later, in an event of its own
                asyncio.get_running_loop().call_later(0.02, stream.put, output)
        return stream

    def script(self, request_id):
        return [TokenOutput(request_id, [8], "length")]


class Failing(StandIn):
    def script(self, request_id):
        return [TokenOutput(request_id, [], "error", message="the kernel failed")]


class Broken(StandIn):
    def stats(self):
        raise ZeroDivisionError("secret of the server")


def app_of(client=None, **settings):
    return create_app(OneLife(client or StandIn()), None, ServerSettings(("tiny",), **settings))


def call(app, method="POST", path=COMPLETIONS, **arguments):
    async def ask():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(ask())


# Browsers


REFUSED = {
    400: {"json": {"prompt": 5}},
    401: {"json": BODY, "headers": {"Authorization": "Bearer wrong"}},
    404: {"path": "/nothing"},
    405: {"method": "GET"},
    413: {"content": b"x" * 5000},
    415: {"content": b"x"},
    431: {"json": BODY, "headers": {"X-Long": "x" * 17000}},
    500: {"method": "GET", "path": "/metrics"},
}


@pytest.mark.parametrize("status", REFUSED)
@pytest.mark.parametrize("origins", [("*",), (PAGE, "http://localhost:3000")])
def test_a_page_of_an_allowed_origin_can_read_every_error(status, origins):
    app = app_of(Broken(), api_key=KEY, max_body_bytes=4000, allowed_origins=origins)
    headers = {"Origin": PAGE, "x-api-key": KEY.encode(), **REFUSED[status].get("headers", {})}
    if status == 401:
        del headers["x-api-key"]
    answer = call(app, **{**REFUSED[status], "headers": headers})
    assert answer.status_code == status
    assert answer.headers["Access-Control-Allow-Origin"] in ("*", PAGE)
    assert answer.headers["X-Request-Id"]
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(("origin", "allowed"), [(PAGE, True), ("https://other.example", False)])
def test_a_preflight_needs_no_key(origin, allowed):
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    app = app_of(api_key=KEY, allowed_origins=(PAGE,))
    answer = call(app, "OPTIONS", headers=headers)
    assert (answer.status_code == 200) == allowed
    assert (answer.headers.get("Access-Control-Allow-Origin") == origin) == allowed
    if allowed:
        assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        assert "x-stainless-os" in answer.headers["Access-Control-Allow-Headers"]


def test_a_stream_may_be_read_by_an_allowed_page_and_by_no_other():
    for origins, origin, allowed in (
        ((PAGE,), PAGE, True),
        ((PAGE,), "http://x", False),
        ((), PAGE, False),
    ):
        app = app_of(allowed_origins=origins)
        answer = call(app, json={**BODY, "stream": True}, headers={"Origin": origin})
        assert answer.text.endswith("data: [DONE]\n\n")
        assert ("Access-Control-Allow-Origin" in answer.headers) == allowed


# Probes and keys


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready"])
def test_probes_may_ask_with_head(path):
    client = StandIn()
    assert call(app_of(client, api_key=KEY), "HEAD", path).status_code == 200
    client.is_alive = False
    assert call(app_of(client), "HEAD", path).status_code == 503


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
def test_the_key_opens_in_the_headers_of_other_apis(name):
    app = app_of(api_key=KEY)
    for sent, status in (
        (KEY, 200),
        (f" {KEY} ", 200),
        (KEY[:-1], 401),
        ("\udcff", 401),
        ("", 401),
    ):
        headers = {name: sent.encode(errors="surrogateescape")}
        assert call(app, "GET", "/v1/models", headers=headers).status_code == status
        headers["Authorization"] = b"Bearer wrong"
        assert call(app, "GET", "/v1/models", headers=headers).status_code == status


# The log


LINE = re.compile(r"(\S+) (\S+) (\d+) (\S+): (.*)")


@pytest.fixture
def lines(caplog):
    """The lines of the log at the default level."""
    caplog.set_level(logging.WARNING)
    return lambda: [one.getMessage() for one in caplog.records if "outcomes" in one.name]


def test_a_good_request_logs_nothing(lines):
    app = app_of()
    for body in (BODY, {**BODY, "stream": True}):
        assert call(app, json=body).status_code == 200
    assert call(app, "GET", "/health").status_code == 200
    assert lines() == []


@pytest.mark.parametrize("status", REFUSED)
def test_each_refused_request_logs_one_line(lines, status):
    app = app_of(Broken(), api_key=KEY, max_body_bytes=4000)
    headers = {"X-Request-Id": "mine", "api-key": KEY.encode()}
    if status == 401:
        del headers["api-key"]
    asked = {**REFUSED[status], "headers": {**headers, **REFUSED[status].get("headers", {})}}
    assert call(app, **asked).status_code == status
    (line,) = lines()
    method, path, said, request_id, message = LINE.fullmatch(line).groups()
    assert (method, path) == (asked.get("method", "POST"), asked.get("path", COMPLETIONS))
    assert (said, request_id) == (str(status), "mine")
    assert len(message) > 5
    assert KEY not in line
    assert "wrong" not in message or status != 401 or message == "the API key is missing or wrong"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": {"a": "my secret"}},
        {"prompt": [5], "stop": "my secret", "temperature": "my secret"},
        {"prompt": [5], "stop": ["my secret"] * 2000},
        {"prompt": [5], "suffix": "my secret"},
        {"prompt": ["my secret", 5]},
    ],
)
def test_a_line_quotes_nothing_of_the_body(lines, body):
    assert call(app_of(), json=body).status_code == 400
    (line,) = lines()
    assert "secret" not in line


def test_a_path_cannot_forge_a_line(lines):
    call(app_of(), "GET", "/v1/%0aERROR%20all%20is%20lost/" + "x" * 5000)
    (line,) = lines()
    assert "\n" not in line
    assert len(line) < 700


def test_an_error_inside_a_stream_logs_its_own_status(lines):
    app = app_of(Failing())
    answer = call(app, json={**BODY, "stream": True}, headers={"X-Request-Id": "mine"})
    assert answer.status_code == 200
    (line,) = lines()
    assert line.startswith(f"POST {COMPLETIONS} 500 mine: the kernel failed")
    page = call(app, "GET", "/metrics").text
    assert value(page, "kiln:requests_refused_total", status="500") == 1


class Leaving:
    """A client that sends a body and is gone."""

    def __init__(self, body):
        self.messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive(self):
        return self.messages.pop() if self.messages else {"type": "http.disconnect"}


class Waiting(StandIn):
    def stream(self, *new):
        stream = TokenStream([one.request_id for one in new], lambda ids: None)
        stream.put(TokenOutput(new[0].request_id, [7]))
        return stream


@pytest.mark.parametrize("streamed", ["true", "false"])
def test_a_client_that_leaves_is_logged_and_counted(lines, streamed):
    app = app_of(Waiting())
    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETIONS,
        "raw_path": b"",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    client = Leaving(b'{"prompt": [5], "max_tokens": 9, "stream": %s}' % streamed.encode())

    async def send(message):
        pass

    asyncio.run(app(scope, client.receive, send))
    (line,) = lines()
    assert f"POST {COMPLETIONS} 499 " in line
    page = call(app, "GET", "/metrics").text
    assert value(page, "kiln:requests_aborted_total") == 1


# Metrics


STATS = {name: 2 if row.label is None else {"some": 2} for name, row in ENGINE_ROWS.items()}


def _page(accept):
    metrics = Metrics(lambda: STATS, lambda: True, 'a "model"')
    metrics.request_success.labels("stop").inc()
    metrics.requests_refused.labels("404").inc()
    text, content_type = metrics.render(accept)
    return text.decode(), content_type


def test_strict_parsers_read_every_metric_under_all_its_names():
    plain, kind = _page("")
    assert kind.startswith("text/plain")
    strict, kind = _page("application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    for families in (
        list(text_string_to_metric_families(plain)),
        list(openmetrics.text_string_to_metric_families(strict)),
    ):
        names = [family.name for family in families]
        assert len(set(names)) == len(names)
        of_type = {family.name.removesuffix("_total"): family for family in families}
        for row in ENGINE_ROWS.values():
            family = of_type[f"kiln:{row.name.removesuffix('_total')}"]
            assert family.type == row.kind
            if row.kind == "counter":
                assert family.samples[0].name == f"kiln:{row.name}_total"
        for own, others in VLLM_NAMES.items():
            for other in others:
                ours, theirs = of_type[f"kiln:{own}"], of_type[f"vllm:{other}"]
                assert [s.value for s in ours.samples] == [s.value for s in theirs.samples]
                assert ours.type == theirs.type
        samples = [sample for family in families for sample in family.samples]
        assert {sample.labels["model_name"] for sample in samples} == {'a "model"'}


def test_requests_are_counted_and_measured():
    app = app_of()
    assert call(app, json={**BODY, "prompt": [[5, 6, 7]] * 2}).status_code == 200
    assert call(app, "GET", "/nothing").status_code == 404
    page = call(app, "GET", "/metrics").text
    assert value(page, "kiln:requests_refused_total", status="404") == 1
    for kiln, vllm, total in (
        ("request_prompt_tokens", "request_prompt_tokens", 6),
        ("request_generation_tokens", "request_generation_tokens", 4),
        ("request_queue_time_seconds", "request_queue_time_seconds", 0.5),
    ):
        assert value(page, f"kiln:{kiln}_count") == value(page, f"vllm:{vllm}_count") == 2
        assert value(page, f"kiln:{kiln}_sum") == value(page, f"vllm:{vllm}_sum") == total


# Events


@pytest.mark.parametrize("end", ["\u0085", "\u2028", "\u2029"])
def test_an_event_is_one_line_to_every_client(end):
    data = event({"text": f"a{end}b \\u2028 é €"})
    assert data.decode().splitlines() == [data.decode().rstrip("\n"), ""]
    assert json.loads(data[6:]) == {"text": f"a{end}b \\u2028 é €"}
