"""A request is one span for a collector, below the caller's, if a flag asks for that."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from one_life import OneLife
from two_tokens import TwoTokens

from kiln.engine.cli.main import main
from kiln.engine.cli.tracing_flags import check_tracing
from kiln.engine.errors import ConfigError
from kiln.engine.server.app import create_app
from kiln.engine.server.serving import ServerSettings
from kiln.engine.server.tracing import RequestTraces

COMPLETIONS = "/v1/completions"
BODY = {"prompt": [5, 6], "max_tokens": 3, "temperature": 0.5, "seed": 7}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Takes what the exporter sends, on loopback."""

    def __init__(self):
        self.bodies, self.paths = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                outer.paths.append(self.path)
                data = self.rfile.read(int(self.headers["Content-Length"]))
                outer.bodies.append((data, self.headers.get("Content-Encoding")))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *args):
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def spans(self):
        """The spans that came, each with its attributes as a dictionary, and their resources."""
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        found = []
        for data, encoding in self.bodies:
            request = ExportTraceServiceRequest()
            request.ParseFromString(gzip.decompress(data) if encoding == "gzip" else data)
            for part in request.resource_spans:
                resource = _attributes(part.resource)
                for scope in part.scope_spans:
                    found += [(span, _attributes(span), resource) for span in scope.spans]
        return found


def _attributes(message):
    found = {}
    for one in message.attributes:
        value = getattr(one.value, one.value.WhichOneof("value"))
        if one.value.HasField("array_value"):
            value = [item.string_value for item in value.values]
        found[one.key] = value
    return found


@pytest.fixture
def collector():
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def trace(collector):
    """Send a request to a traced application; return the answer and its spans."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

    def send(path=COMPLETIONS, client=None, headers=None, **options):
        traces = RequestTraces.start(collector.url, "http/protobuf")
        app = create_app(OneLife(client or TwoTokens()), None, ServerSettings(("tiny",)), traces)

        async def ask():
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
                return await http.post(path, headers=headers, **options)

        collector.bodies.clear()
        answer = asyncio.run(ask())
        traces.close()
        return answer, collector.spans()

    return send


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_is_one_span_with_the_names_of_the_conventions(trace, streams):
    answer, [(span, told, resource)] = trace(
        json={**BODY, "stream": streams}, headers={"X-Request-Id": "r-7", "traceparent": PARENT}
    )
    assert answer.status_code == 200
    assert (span.name, span.kind) == ("text_completion tiny", 2)  # of a server
    assert span.trace_id.hex() == PARENT.split("-")[1]
    assert span.parent_span_id.hex() == PARENT.split("-")[2]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert told.pop("gen_ai.latency.e2e") == pytest.approx(seconds, abs=1e-6)
    assert 0 < told.pop("gen_ai.latency.time_to_first_token") <= seconds
    assert told == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kiln",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.request.id": "r-7",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.n": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.prompt_tokens": 2,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 1,
        "gen_ai.latency.time_in_queue": 0.25,
        "http.request.method": "POST",
        "url.path": COMPLETIONS,
        "http.response.status_code": 200,
    }
    assert resource["service.name"] == "kiln"


def test_a_failed_request_is_an_error_without_a_word_of_the_prompt(trace):
    failing = TwoTokens(("error", "NaN"))
    _, [(span, told, _)] = trace(client=failing, json={**BODY, "stream": True})
    assert (told["error.type"], told["http.response.status_code"]) == ("500", 500)
    assert span.status.code == 2
    assert "NaN" in span.status.message
    assert not span.parent_span_id


def test_what_does_not_reach_the_engine_has_no_span(trace):
    answer, spans = trace(json={"prompt": [5], "n": 0})
    assert (answer.status_code, spans) == (400, [])


def test_without_the_flag_no_package_of_it_is_imported():
    """Which a test before this one may have done: so in a process of its own."""
    program = "import sys, kiln.engine.cli.serving, kiln.engine.server.tracing; "
    program += "own = ('opentelemetry.sdk', 'opentelemetry.exporter'); "
    program += "print([one for one in sys.modules if one.startswith(own)])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_missing_packages_are_named_before_the_model_loads(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    assert main(["serve", "--otlp-traces-endpoint", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: --otlp-traces-endpoint: needs packages")
    assert "pip install" in said


class Given:
    def __init__(self, url):
        self.otlp_traces_endpoint = url


@pytest.mark.parametrize("url", ["localhost:4317", "ftp://x", "http://", "http://[", ""])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        check_tracing(Given(url))


def test_the_protocol_is_that_of_opentelemetrys_variables(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)
    assert check_tracing(Given(None)) is None
    monkeypatch.setattr("kiln.engine.server.tracing.require_packages", lambda protocol: None)
    assert check_tracing(Given("http://x")) == ("http://x", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    assert check_tracing(Given("http://x")) == ("http://x", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL='http/json'"):
        check_tracing(Given("http://x"))
