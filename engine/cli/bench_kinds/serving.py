"""Output tokens per second and latencies of a server under concurrent streams."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from kiln.engine.cli.bench_model import refuse_parallel
from kiln.engine.cli.measuring import say, say_written
from kiln.engine.cli.options import add_engine_arguments, engine_flags, find_model, served_name
from kiln.engine.errors import ConfigError

NAME = "serving"
HELP = "a server under concurrent streams"
_LOAD = ("num_prompts", "concurrency", "prompt_tokens", "output_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_engine_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--url", help="measure this server; default: one of MODEL, on a free port")
    load.add_argument("--num-prompts", type=int, default=128, metavar="N", help="default 128")
    load.add_argument("--concurrency", type=int, default=16, metavar="N", help="default 16")
    load.add_argument(
        "--prompt-tokens", type=int, default=48, metavar="N", help="longest prompt; default 48"
    )
    load.add_argument(
        "--output-tokens", type=int, default=64, metavar="N", help="per answer; default 64"
    )
    load.add_argument(
        "--baseline",
        choices=("none", "transformers"),
        default="none",
        help="also run the same prompts through transformers' generate",
    )
    load.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write JSON, a table and a plot there"
    )


def run(args: argparse.Namespace) -> int:
    """Measure the server, then the baseline."""
    from kiln.engine.bench import serving
    from kiln.engine.bench.report import command_line

    for name in _LOAD:
        if getattr(args, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(args, name)}: must be 1 or more")
    refuse_parallel(args, "--baseline transformers", args.baseline == "transformers")
    folder = find_model(args)
    prompts = serving.make_prompts(folder, args.num_prompts, args.prompt_tokens)
    with _server(args) as url:
        say(f"measuring {url}")
        rows = [serving.measure(url, prompts, args.output_tokens, args.concurrency)]
    if args.baseline == "transformers":
        say("measuring transformers on the same prompts")
        # Imported here: torch and transformers must not take the server's cores.
        from kiln.engine.bench import baseline, in_process

        what = (folder, prompts, args.output_tokens, args.dtype, args.device, args.concurrency)
        rows += baseline.measure(*what)
        if args.url is None:  # else the server still uses the GPU
            rows.append(in_process.measure(*what))
    load = {name: getattr(args, name) for name in _LOAD}
    report = serving.make_report(command_line("kiln"), served_name(args), rows, load)
    print(serving.markdown(report))
    say_written(serving.write(report, args.output) if args.output is not None else ())
    return 0


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """Yield the address of the server to measure."""
    from kiln.engine.cli.local_server import local_server

    if args.url is not None:
        yield args.url.rstrip("/").removesuffix("/v1")
        return
    say("starting a server")
    with local_server(engine_flags(args)) as (url, _):
        yield url
