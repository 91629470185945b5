"""Serve a model over OpenAI's API.

The server listens at once; readiness is 503 until the model is loaded. On SIGTERM or Ctrl-C,
requests in flight may finish within --shutdown-timeout; a second signal stops at once. If the
engine process dies, clients get an error within a second and the server exits with code 1, so that
a supervisor can restart it.

With --tp N a model runs on N GPUs, each with a process. torchrun may start these too, on one
machine or several: torchrun --nproc-per-node N --no-python kiln serve …
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from kiln.engine.cli.options import add_engine_arguments, add_lora_arguments
from kiln.engine.cli.reply_flags import add_reply_arguments, reply_formats

NAME = "serve"
HELP = "serve a model over OpenAI's API"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server and of the engine."""
    add_engine_arguments(parser)
    add_lora_arguments(parser)
    add_reply_arguments(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1")
    server.add_argument("--port", type=int, default=8000, help="0: any free port; default 8000")
    server.add_argument(
        "--served-model-name", metavar="NAME", help="default: the folder's name or the hub id"
    )
    server.add_argument(
        "--chat-template", metavar="FILE", help="in place of the model's own; also its text itself"
    )
    server.add_argument(
        "--ignore-unknown-fields",
        action="store_true",
        help="log fields of a request that Kiln does not know, instead of refusing it",
    )
    key = server.add_mutually_exclusive_group()
    key.add_argument("--api-key", metavar="KEY", help="required of every client")
    key.add_argument("--api-key-file", type=Path, metavar="FILE", help="file that contains the key")
    server.add_argument(
        "--allow-unauthenticated",
        action="store_true",
        help="serve other machines without a key",
    )
    server.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for requests in flight to finish at shutdown; default 30",
    )
    server.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from kiln.engine.cli.listen import is_loopback, open_listener
    from kiln.engine.cli.options import engine_config, find_model
    from kiln.engine.cli.torchrun import with_torchrun
    from kiln.engine.errors import ConfigError
    from kiln.engine.process.child import EngineProcess

    key = _api_key(args)
    if key is None and not is_loopback(args.host) and not args.allow_unauthenticated:
        raise ConfigError(
            f"--host {args.host} is reachable from other machines: set --api-key or "
            "--api-key-file, or allow everybody with --allow-unauthenticated"
        )
    if not args.shutdown_timeout >= 0:
        raise ConfigError(f"--shutdown-timeout {args.shutdown_timeout}: must be 0 or more seconds")
    reply_formats(args)  # names the parsers that are unknown, before the model loads
    folder = find_model(args)
    config, place = with_torchrun(engine_config(args, folder))
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    if place is not None and place.rank > 0:
        from kiln.engine.runner.follow import follow_launched

        return follow_launched(place, config)
    with open_listener(args.host, args.port) as listener:
        process = EngineProcess.spawn(config)
        try:
            # These imports overlap the engine process's import of torch.
            from kiln.engine.cli.serving import run_server

            return run_server(args, process, listener, folder, key)
        finally:
            process.stop()


def _api_key(args: argparse.Namespace) -> str | None:
    """Return the key from the flag or the file. Raises ConfigError."""
    from kiln.engine.errors import ConfigError

    key: str | None = args.api_key
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {args.api_key_file}: {error}") from error
    if key == "":
        raise ConfigError("the API key is empty: give it a value")
    return key
