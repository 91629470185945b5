"""The traces of ``--otlp-traces-endpoint``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kiln.cache.env import traces_protocol
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.server.tracing import RequestTraces


def check_tracing(args: argparse.Namespace) -> tuple[str, str] | None:
    """Return the collector's URL and the protocol; None without the flag. Raises ConfigError."""
    endpoint: str | None = args.otlp_traces_endpoint
    if endpoint is None:
        return None
    variable, protocol = traces_protocol()
    protocol = protocol or "grpc"  # vLLM's default
    if protocol not in ("grpc", "http/protobuf"):
        raise ConfigError(f"{variable}={protocol[:80]!r}: must be grpc or http/protobuf")
    try:
        parts = urlsplit(endpoint)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        fine = False
    if not fine:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint[:80]!r}: want a URL such as http://localhost:4317 "
            "for grpc, or http://localhost:4318/v1/traces for http/protobuf"
        )
    from kiln.engine.server.tracing import require_packages

    require_packages(protocol)
    return endpoint, protocol


def start_tracing(args: argparse.Namespace) -> RequestTraces | None:
    """Start to send traces; None without the flag. Raises ConfigError."""
    checked = check_tracing(args)
    if checked is None:
        return None
    from kiln.engine.server.tracing import RequestTraces

    return RequestTraces.start(*checked)
