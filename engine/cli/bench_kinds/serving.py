"""Output tokens per second and latencies of a server under concurrent streams."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kiln.engine.cli.bench_model import refuse_parallel
from kiln.engine.cli.measuring import say, say_written
from kiln.engine.cli.options import add_engine_arguments, engine_flags, find_model, served_name
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.load_client import Arrivals

NAME = "serving"
HELP = "a server under concurrent streams"
_LOAD = ("num_prompts", "concurrency", "prompt_tokens", "output_tokens")
_CONCURRENCY = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_engine_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--url", help="measure this server; default: one of MODEL, on a free port")
    load.add_argument("--num-prompts", type=int, default=128, metavar="N", help="default 128")
    load.add_argument("--api-key", metavar="KEY", help="API key of the server at --url")
    load.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=int,
        metavar="N",
        help=f"requests under way; default {_CONCURRENCY}, with --request-rate no limit",
    )
    load.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests that arrive per second, at random times (Poisson); default: each as soon "
        "as another ends",
    )
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

    arrivals = _check(args)
    refuse_parallel(args, "--baseline transformers", args.baseline == "transformers")
    folder = find_model(args)
    prompts = serving.make_prompts(folder, args.num_prompts, args.prompt_tokens)
    with _server(args) as url:
        say(f"measuring {url}")
        rows = [serving.measure(url, prompts, args.output_tokens, arrivals, args.api_key)]
    if args.baseline == "transformers":
        say("measuring transformers on the same prompts")
        # Imported here: torch and transformers must not take the server's cores.
        from kiln.engine.bench import baseline, in_process

        at_a_time = arrivals.concurrency or _CONCURRENCY
        what = (folder, prompts, args.output_tokens, args.dtype, args.device, at_a_time)
        rows += baseline.measure(*what)
        if args.url is None:  # else the server still uses the GPU
            rows.append(in_process.measure(*what))
    load = {name: getattr(args, name) for name in (*_LOAD, "request_rate")}
    load["concurrency"] = arrivals.concurrency
    load["arrivals"] = serving.describe(arrivals)
    report = serving.make_report(command_line("kiln"), served_name(args), rows, load)
    print(serving.markdown(report))
    say_written(serving.write(report, args.output) if args.output is not None else ())
    return 0


def _check(args: argparse.Namespace) -> Arrivals:
    """Return when requests are sent. Raises ConfigError."""
    from kiln.engine.bench.load_client import Arrivals

    for name in _LOAD:
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is not None and value < 1:
            raise ConfigError(f"{flag} {value}: must be 1 or more")
    rate = args.request_rate
    if rate is not None and not 0 < rate < math.inf:
        raise ConfigError(f"--request-rate {rate:g}: must be above 0; leave it out for no waiting")
    if rate is not None and args.baseline != "none":
        raise ConfigError("--request-rate: the baseline has no arrivals; leave out one of them")
    if args.api_key is not None and args.url is None:
        raise ConfigError("--api-key: is that of the server at --url, which is not given")
    if args.concurrency is None and rate is None:
        return Arrivals(_CONCURRENCY)
    return Arrivals(args.concurrency, rate)


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
