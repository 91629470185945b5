"""The flags of ``kiln serve`` that are no settings of the engine: one table a group."""

from __future__ import annotations

from pathlib import Path

from kiln.engine.cli.flags import Flag, group
from kiln.engine.cli.several import is_origin_like

SERVER = group(
    "server",
    Flag("--host", "address to listen on; default 127.0.0.1"),
    Flag("--port", "0: any free port; default 8000", type=int),
    Flag(
        "--served-model-name",
        "names that requests may give; answers carry the one they were asked by, metrics the "
        "first. Write MODEL before it. Default: the folder's name or the hub id",
        metavar="NAME",
        nargs="+",
    ),
    Flag("--api-key", "required of every client", metavar="KEY"),
    Flag("--api-key-file", "file that contains the key", type=Path, metavar="FILE"),
    Flag("--allow-unauthenticated", "serve other machines without a key", switch=True),
    Flag(
        "--allowed-origins",
        "pages that may use the API from a browser, such as https://example.org, or '*' for "
        "all; also a JSON list. Default: none but the pages of this server",
        metavar="ORIGIN",
        nargs="+",
        fits=is_origin_like,
    ),
    Flag(
        "--allowed-hosts",
        "names of this server in a request's Host, such as *.example.org; '*': all. Default: on "
        "this machine alone and without a key localhost and the --host, else all. Addresses are "
        "always allowed",
        metavar="NAME",
        nargs="+",
    ),
    Flag(
        "--root-path",
        "path under which a proxy serves this server, whether it takes it off or not",
        metavar="PATH",
    ),
    Flag(
        "--timeout-keep-alive",
        "time that a connection may wait for its next request; default 75",
        type=float,
        metavar="SECONDS",
    ),
    Flag(
        "--shutdown-timeout",
        "time for requests in flight to finish at shutdown; default 30",
        type=float,
        metavar="SECONDS",
    ),
    Flag(
        "--max-restarts",
        "how often in a row an engine that died or froze is started again, after 1, 2, 4 … s; "
        "5 minutes of service end the row; 0: the server exits instead; default 3",
        type=int,
        metavar="N",
    ),
)
LOGS = group(
    "logs",
    Flag(
        "--log-level",
        "of Kiln's lines; other packages' are logged from warning on, or all at debug; default "
        "info",
        "logs.level",
    ),
    Flag("--log-format", "json: one object a line, from every process", "logs.format"),
    Flag(
        "--access-log",
        "a line for each request: client, path, status, bytes, times, model and tokens, but no "
        "text",
        switch=True,
    ),
    Flag(
        "--disable-access-log-for-endpoints",
        "paths without such a line, separated by commas, as in /health,/metrics",
        metavar="PATHS",
    ),
    Flag(
        "--disable-log-stats",
        "no line each 10 s of tokens/s, requests and KV pool while requests run",
        switch=True,
    ),
    Flag(
        "--otlp-traces-endpoint",
        "collector of OpenTelemetry for a span of each request, as in http://localhost:4317; "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is grpc, the default, or http/protobuf",
        metavar="URL",
    ),
)
TLS = group(
    "TLS",
    Flag("--ssl-certfile", "serve HTTPS with this certificate, PEM", type=Path, metavar="FILE"),
    Flag(
        "--ssl-keyfile",
        "key of the certificate, PEM without a passphrase; default: in --ssl-certfile",
        type=Path,
        metavar="FILE",
    ),
    Flag("--ssl-ca-certs", "authorities of clients, PEM", type=Path, metavar="FILE"),
    Flag(
        "--ssl-cert-reqs",
        "certificates of clients: 0, the default, asks for none, 1 checks what is sent, 2 requires "
        "one",
        type=int,
        metavar="N",
    ),
    Flag("--ssl-ciphers", "of TLS 1.2, by OpenSSL's names; default: Python's", metavar="LIST"),
    Flag(
        "--enable-ssl-refresh",
        "look each 10 s whether the files have changed, and use them for new connections",
        switch=True,
    ),
)
CHATS = group(
    "chats",
    Flag(
        "--chat-template",
        "in place of the model's own; also its text itself, or the name of one of the model's",
        metavar="FILE",
    ),
    Flag(
        "--tool-call-parser",
        "format of tool calls, such as hermes or qwen3_coder; none: calls stay text. "
        "Default: the one that the chat template shows",
        metavar="NAME",
    ),
    Flag(
        "--reasoning-parser",
        "format of reasoning, such as qwen3 or deepseek_r1; none: it stays in the content. "
        "Default: <think>…</think> if the chat template has it",
        metavar="NAME",
    ),
    Flag(
        "--ignore-unknown-fields",
        "log fields of a request that Kiln does not know, instead of refusing it",
        switch=True,
    ),
)
