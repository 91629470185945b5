"""Serve a model over OpenAI's API.

The server listens at once; readiness is 503 until the model is loaded. On SIGTERM or Ctrl-C,
requests in flight may finish within --shutdown-timeout; a second signal stops at once. If the
engine process dies or freezes, its clients get an error within seconds, and it is started again:
readiness is 503 until then. After --max-restarts of these in a row the server exits with code 1.

With --tp N a model runs on N GPUs, each with a process. torchrun may start these too, on one
machine or several: torchrun --nproc-per-node N --no-python kiln serve …
"""

from __future__ import annotations

import argparse
from functools import partial

from kiln.engine.cli.engine_flags import LORA
from kiln.engine.cli.flags import add_groups
from kiln.engine.cli.neutral_flags import add_neutral_flags
from kiln.engine.cli.options import add_engine_arguments
from kiln.engine.cli.parser import KilnParser
from kiln.engine.cli.reply_flags import reply_formats
from kiln.engine.cli.serve_flags import CHATS, LOGS, SERVER, TLS

_MAX_RESTARTS = 3  # in a row
HELP = "serve a model over OpenAI's API"
OFTEN = (
    "--host",
    "--port",
    "--api-key-file",
    "--served-model-name",
    "--max-model-len",
    "--tensor-parallel-size",
    "--gpu-memory-utilization",
    "--lora-modules",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server and of the engine."""
    add_engine_arguments(parser)
    add_groups(parser, (LORA,), "engine")
    add_groups(parser, (CHATS, SERVER, TLS, LOGS))
    if isinstance(parser, KilnParser):
        parser.often = OFTEN
    parser.set_defaults(host="127.0.0.1", port=8000, log_level="info")
    parser.set_defaults(timeout_keep_alive=75.0, shutdown_timeout=30.0)
    add_neutral_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from kiln.engine.cli.hosts import read_hosts, read_root_path
    from kiln.engine.cli.listen import is_loopback, open_listener
    from kiln.engine.cli.options import find_model, served_names
    from kiln.engine.cli.origins import read_origins
    from kiln.engine.cli.tls_flags import read_tls
    from kiln.engine.cli.torchrun import with_torchrun
    from kiln.engine.cli.tracing_flags import check_tracing
    from kiln.engine.distributed.logs import configure
    from kiln.engine.errors import ConfigError
    from kiln.engine.process.child import EngineProcess

    key = _api_key(args)
    if key is None and not is_loopback(args.host) and not args.allow_unauthenticated:
        raise ConfigError(
            f"--host {args.host} is reachable from other machines: set --api-key or "
            "--api-key-file, or allow everybody with --allow-unauthenticated"
        )
    for name in ("shutdown_timeout", "timeout_keep_alive"):
        seconds, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if not seconds >= 0:
            raise ConfigError(f"{flag} {seconds}: must be 0 or more seconds")
    served_names(args)  # both refuse a command line whose MODEL was taken for another value
    read_origins(args.allowed_origins or ())
    read_hosts(args.allowed_hosts, args.host, has_key=key is not None)
    read_root_path(args.root_path)
    read_tls(args)
    check_tracing(args)
    reply_formats(args)  # names the parsers that are unknown, before the model loads
    config, files = find_model(args)
    config, place = with_torchrun(config)
    args.max_restarts = _max_restarts(args.max_restarts, by_torchrun=place is not None)
    rank = 0 if place is None else place.rank
    configure(config.logs, f"rank {rank}" if rank else "")
    if place is not None and rank > 0:
        from kiln.engine.runner.follow import follow_launched

        return follow_launched(place, config)
    with open_listener(args.host, args.port) as listener:
        spawn = partial(EngineProcess.spawn, config)
        process = spawn()
        try:
            # These imports overlap the engine process's import of torch.
            from kiln.engine.cli.serving import run_server

            return run_server(args, process, spawn, listener, files, key)
        finally:
            process.stop()


def _max_restarts(given: int | None, *, by_torchrun: bool) -> int:
    """Return how often in a row a dead engine is started again. Raises ConfigError."""
    from kiln.engine.errors import ConfigError

    if by_torchrun:
        if given is not None:
            raise ConfigError(
                f"--max-restarts {given}: torchrun has started the other ranks, and only it can "
                "start them again: leave the flag out, and give torchrun its own --max-restarts"
            )
        return 0
    if given is None:
        return _MAX_RESTARTS
    if given < 0:
        raise ConfigError(f"--max-restarts {given}: must be 0 or more")
    return given


def _api_key(args: argparse.Namespace) -> str | None:
    """Return the key from the flag or the file. Raises ConfigError."""
    from kiln.engine.errors import ConfigError

    key: str | None = args.api_key
    if args.api_key_file is not None:
        if key is not None:
            raise ConfigError("--api-key and --api-key-file: give one of them")
        try:
            key = args.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {args.api_key_file}: {error}") from error
    if key == "":
        raise ConfigError("the API key is empty: give it a value")
    return key
