"""Output tokens per second and latencies of a server under concurrent streams."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kiln.engine.cli.bench_model import refuse_parallel, write_out
from kiln.engine.cli.measuring import add_files, say
from kiln.engine.cli.numbers import count
from kiln.engine.cli.options import (
    add_engine_arguments,
    engine_flags,
    find_model,
    served_name,
)
from kiln.engine.cli.urls import server_url
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.load_client import Arrivals

HELP = "a server under concurrent streams"
_CONCURRENCY = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_engine_arguments(parser)
    load = parser.add_argument_group("load")
    load.add_argument("--url", help="measure this server; default: one of MODEL, on a free port")
    load.add_argument("--num-prompts", type=count, default=128, metavar="N", help="default 128")
    load.add_argument("--api-key", metavar="KEY", help="API key of the server at --url")
    load.add_argument(
        "--concurrency",
        "--max-concurrency",
        type=count,
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
        "--prompt-tokens", type=count, default=48, metavar="N", help="longest prompt; default 48"
    )
    load.add_argument(
        "--output-tokens", type=count, default=64, metavar="N", help="per answer; default 64"
    )
    load.add_argument(
        "--baseline",
        choices=("none", "transformers"),
        default="none",
        help="also run the same prompts through transformers' generate",
    )
    add_files(load)


def run(args: argparse.Namespace) -> int:
    """Measure the server, then the baseline."""
    from kiln.engine.bench import serving
    from kiln.engine.bench.plots import draw_throughput
    from kiln.engine.bench.report import Report, command_line, with_ratio

    arrivals = _check(args)
    refuse_parallel(args)
    config, model_files = find_model(args)
    prompts = serving.make_prompts(model_files, args.num_prompts, args.prompt_tokens)
    with _server(args) as url:
        say(f"measuring {url}")
        rows = [serving.measure(url, prompts, args.output_tokens, arrivals, args.api_key)]
    if args.baseline == "transformers":
        say("measuring transformers on the same prompts")
        # Imported here: torch and transformers must not take the server's cores.
        from kiln.engine.bench import in_process

        at_a_time = arrivals.concurrency or _CONCURRENCY
        # All requests are submitted at once.
        limits = replace(config.scheduler, max_num_seqs=at_a_time, max_waiting=sys.maxsize)
        config = replace(config, scheduler=limits)
        alone = args.url is None  # else the server still uses the GPU
        rows += in_process.measure(config, prompts, args.output_tokens, say, kiln=alone)
    load = {
        "num_prompts": args.num_prompts,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
        "concurrency": arrivals.concurrency,
        "request_rate": args.request_rate,
        "arrivals": serving.describe(arrivals),
    }
    about = {"model": served_name(args), "device": args.device or "auto"}
    report = Report(args.kind, command_line("kiln"), with_ratio(rows), load, about)
    text = serving.markdown(report)
    files = partial(report.write_named, text=text, draw=draw_throughput)
    return write_out(args, report, text, files)


def _check(args: argparse.Namespace) -> Arrivals:
    """Return when requests are sent. Raises ConfigError."""
    from kiln.engine.bench.load_client import Arrivals

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
        yield server_url(args.url)
        return
    say("starting a server")
    with local_server(engine_flags(args)) as (url, _):
        yield url
