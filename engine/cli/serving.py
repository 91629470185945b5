"""The part of ``kiln serve`` with heavy imports, run after the engine process was started."""

from __future__ import annotations

import argparse
import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing

import kiln
from kiln.engine.cli.hosts import read_hosts, read_root_path
from kiln.engine.cli.listen import url_of
from kiln.engine.cli.options import lora_modules, served_names
from kiln.engine.cli.origins import read_origins
from kiln.engine.cli.progress import LoadingDisplay, LoadingLog
from kiln.engine.cli.reply_flags import reply_formats
from kiln.engine.cli.tls_flags import read_tls
from kiln.engine.cli.tracing_flags import start_tracing
from kiln.engine.models.model_folder import ModelFiles
from kiln.engine.process.child import EngineProcess
from kiln.engine.process.client import EngineClient
from kiln.engine.process.supervisor import RestartPolicy, Supervisor
from kiln.engine.server.app import create_app
from kiln.engine.server.periodic import repeated
from kiln.engine.server.run import Seconds, serve
from kiln.engine.server.serving import ServerSettings, read_defaults
from kiln.engine.server.stats_log import STATS_SECONDS, StatsLog
from kiln.engine.server.tls import REFRESH_SECONDS, Refresher
from kiln.engine.text.tokenizer import Tokenizer


def run_server(
    args: argparse.Namespace,
    process: EngineProcess,
    spawn: Callable[[], EngineProcess],
    listener: socket.socket,
    files: ModelFiles,
    api_key: str | None,
) -> int:
    """Serve until a signal and return 0. Raises KilnError if the engine cannot be kept running.

    ``process`` is the first engine process, ``spawn`` starts another one.
    """
    tokenizer = Tokenizer.load_if_present(files, args.chat_template)
    names = tuple(module.name for module in lora_modules(args))
    templates = [] if tokenizer is None else tokenizer.chat_template_sources
    settings = ServerSettings(
        served_names(args),
        read_defaults(files.folder),
        api_key,
        names,
        allowed_origins=read_origins(args.allowed_origins or ()),
        ignore_unknown_fields=bool(args.ignore_unknown_fields),
        replies=reply_formats(args, templates),
        quiet_paths=_quiet_paths(args),
        root_path=read_root_path(args.root_path),
        allowed_hosts=read_hosts(args.allowed_hosts, args.host, has_key=api_key is not None),
    )
    seconds = Seconds(keep_alive=args.timeout_keep_alive, shutdown=args.shutdown_timeout)
    policy = RestartPolicy(args.max_restarts)
    tls = read_tls(args)
    context = None if tls is None else tls.context()
    url = url_of(listener, "http" if tls is None else "https")

    async def run() -> None:
        shown = LoadingLog() if args.log_format == "json" else LoadingDisplay()
        with closing(shown) as display:
            async with AsyncExitStack() as beside:
                engine = await beside.enter_async_context(
                    Supervisor(process, spawn, policy, display)
                )
                traces = start_tracing(args)
                if traces is not None:
                    beside.callback(traces.close)
                app = create_app(engine, tokenizer, settings, traces)
                if not args.disable_log_stats:
                    stats = StatsLog(app.state.serving.metrics.tokens, engine.stats)
                    await beside.enter_async_context(repeated(stats.look, STATS_SECONDS))
                if tls is not None and context is not None and args.enable_ssl_refresh:
                    certificate = Refresher(tls, context)
                    await beside.enter_async_context(repeated(certificate.look, REFRESH_SECONDS))

                def announce() -> None:
                    display.close()
                    _print_summary(engine.client, settings, tokenizer, url, process.started)

                await serve(app, engine, listener, seconds, announce, context)

    asyncio.run(run())
    return 0


def _quiet_paths(args: argparse.Namespace) -> tuple[str, ...] | None:
    """Return the paths that the access log leaves out; None: there is no access log."""
    if not args.access_log:
        return None
    paths = (args.disable_access_log_for_endpoints or "").split(",")
    return tuple(path.strip() for path in paths if path.strip())


def _print_summary(
    client: EngineClient,
    settings: ServerSettings,
    tokenizer: Tokenizer | None,
    url: str,
    started: float,
) -> None:
    """Print the model, its URL, and an example request."""
    info = client.model_info
    blocks = int(client.stats().get("kv_blocks_total", 0))
    pool = f" · {blocks} KV blocks" if blocks else ""
    steps = f" · steps of {info.budget}" if info.budget else ""
    count = len(settings.adapters)
    adapters = f" · {count} LoRA adapter{'s' if count > 1 else ''}" if count else ""
    print(
        f"\nKiln {kiln.__version__} serves {settings.served_model_name}: {info.dtype} on "
        f"{info.device} · context {info.max_model_len} tokens{steps}{pool}{adapters} · ready in "
        f"{time.monotonic() - started:.1f} s"
    )
    if "linear" in info.kernels:
        print(f"projections: {info.kernels['linear'].partition(': ')[2]}")
    embeds = info.embedder is not None
    print(f"{url}  ({'' if embeds else 'a page to chat; '}/docs, /metrics)")
    print(f"try:\n{_curl_line(settings, tokenizer, url, embeds=embeds)}\n", flush=True)


def _curl_line(
    settings: ServerSettings, tokenizer: Tokenizer | None, url: str, *, embeds: bool
) -> str:
    route, body = "completions", '{"prompt": [1, 2, 3]}'
    if embeds:
        prompt = "[1, 2, 3]" if tokenizer is None else '"Once upon a time"'
        route, body = "embeddings", f'{{"input": {prompt}}}'
    elif tokenizer is not None and tokenizer.has_chat_template:
        route = "chat/completions"
        body = '{"messages": [{"role": "user", "content": "What is 17 + 25?"}]}'
    elif tokenizer is not None:
        body = '{"prompt": "Once upon a time"}'
    key = "" if settings.api_key is None else ' -H "Authorization: Bearer $KEY"'
    return f"curl {url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{body}'"
