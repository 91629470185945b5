"""A span of OpenTelemetry for each request that reached the engine.

Its packages are imported only if there is a collector.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from starlette.datastructures import Headers

from kiln.engine.errors import ConfigError
from kiln.engine.server.exchange import ABORTED, Exchange

# Attributes that name a span.
OPERATION, MODEL = "gen_ai.operation.name", "gen_ai.request.model"
_EXPORTERS: Mapping[str, str] = MappingProxyType(  # by OpenTelemetry's names of the protocols
    {
        "grpc": "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
        "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    }
)
_CLOSE_SECONDS = 3.0  # for the last spans to be sent


def require_packages(protocol: str) -> None:
    """Raise ConfigError if what sends spans by a protocol cannot be imported."""
    try:
        for name in ("opentelemetry.sdk.trace.export", _EXPORTERS[protocol]):
            import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint: needs packages that are not installed ({error}): pip install "
            "opentelemetry-sdk opentelemetry-exporter-otlp"
        ) from error


class RequestTraces:
    """Sends spans to a collector, in a thread of its own. Make it with ``start``."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("kiln")
        self._parent_of = TraceContextTextMapPropagator().extract

    @classmethod
    def start(cls, endpoint: str, protocol: str) -> RequestTraces:
        """Send spans to a collector by "grpc" or "http/protobuf".

        Headers, timeouts and so on are OpenTelemetry's variables. Raises ConfigError if the
        packages are not installed.
        """
        require_packages(protocol)
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "kiln"}))
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = import_module(_EXPORTERS[protocol]).OTLPSpanExporter(endpoint=endpoint)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        return cls(provider)

    def record(self, exchange: Exchange) -> None:
        """Make the span of a request that has ended, below the caller's span if it named one."""
        work = exchange.work
        if work is None:
            return
        from opentelemetry.trace import SpanKind, StatusCode

        seconds, now = time.monotonic() - exchange.started, time.time_ns()
        told = {**work.attributes(), "gen_ai.latency.e2e": seconds}
        told |= {
            "gen_ai.provider.name": "kiln",
            "gen_ai.request.id": exchange.request_id or "",
            "http.request.method": exchange.scope["method"],
            "url.path": exchange.scope["path"],
            "http.response.status_code": exchange.status,
        }
        if exchange.status >= 400:
            told["error.type"] = str(exchange.status)
        span = self._tracer.start_span(
            f"{told[OPERATION]} {told[MODEL]}",
            context=self._parent_of(Headers(scope=exchange.scope)),
            kind=SpanKind.SERVER,
            attributes=told,
            start_time=now - int(seconds * 1e9),
        )
        if exchange.status >= 500 or exchange.status == ABORTED:
            span.set_status(StatusCode.ERROR, exchange.reason)
        span.end(now)

    def close(self) -> None:
        """Send the last spans, for a few seconds at most."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)
