"""Throughput and latencies of a server under load, at one or several rates or concurrencies.

Requests are streamed and greedy, and have exactly as many output tokens as the data set says. The
flags of the load are those of vLLM's bench serve.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kiln.engine.cli.bench_model import check_baseline, subject_of, write_out
from kiln.engine.cli.engine_flags import ENGINE
from kiln.engine.cli.flags import command_line as flags_of
from kiln.engine.cli.load_flags import (
    CONCURRENCY,
    add_load_arguments,
    dataset_name,
    dataset_of,
    points_of,
)
from kiln.engine.cli.measuring import add_files, load_display, say
from kiln.engine.cli.numbers import above_zero
from kiln.engine.cli.options import add_engine_arguments
from kiln.engine.cli.urls import server_url
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    import subprocess

    from kiln.engine.bench.report import Row
    from kiln.engine.bench.served_engine import ServedEngine
    from kiln.engine.bench.server_log import ServerLog
    from kiln.engine.bench.serving import Load
    from kiln.engine.bench.side_by_side import Measured
    from kiln.engine.config import EngineConfig
    from kiln.engine.models.model_folder import ModelFiles

HELP = "a server under load, at several rates or concurrencies, also beside vLLM"
_FILES = {
    "random": "serving",
    "prefix_repetition": "serving-prefix",
    "sharegpt": "serving-sharegpt",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags and those of the load."""
    add_engine_arguments(parser)
    add_load_arguments(parser)
    other = parser.add_argument_group("comparison and files")
    other.add_argument(
        "--baseline",
        choices=("none", "transformers", "vllm"),
        default="none",
        help="then send the same requests to vLLM's server, or run them through transformers' "
        "generate in this process",
    )
    other.add_argument(
        "--baseline-python", metavar="PATH", help="interpreter that has vllm; default: this one"
    )
    other.add_argument(
        "--ready-check-timeout-sec", type=above_zero, default=600.0, metavar="S",
        help="longest start of a server; default 600",
    )  # fmt: skip
    add_files(other)


def run(args: argparse.Namespace) -> int:
    """Measure Kiln's server, then the baseline. Raises KilnError."""
    from kiln.engine.bench.report import with_ratio

    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as parent:
        name, config, files = subject_of(args, Path(parent))
        python = check_baseline(args, config)
        if files.folder.is_relative_to(parent):  # a built-in shape
            from kiln.engine.bench.shape_tokenizer import write_shape_tokenizer
            from kiln.engine.models.registry import vocabulary_size

            write_shape_tokenizer(files.folder, vocabulary_size(files))
        load = _load(args, config, files)
        measured = _measure_servers(args, config, python, load)
        if args.baseline == "transformers" and measured.failure is None:
            measured.rows += _in_process(args, config, load)
    rows = with_ratio(measured.rows, "load")
    return _finish(args, name, load, replace(measured, rows=rows))


def _load(args: argparse.Namespace, config: EngineConfig, files: ModelFiles) -> Load:
    """Return what every server gets. Raises ConfigError."""
    from kiln.engine.bench.serving import Load, random_seed
    from kiln.engine.models.registry import vocabulary_size
    from kiln.engine.text.tokenizer import Tokenizer

    points, is_chat = points_of(args), args.backend == "openai-chat"
    if args.api_key is not None and args.url is None:
        raise ConfigError("--api-key: is that of the server at --url, which is not given")
    needs_text = is_chat or dataset_name(args) == "sharegpt"
    tokenizer = Tokenizer.load_if_present(files) if needs_text else None
    if is_chat and (tokenizer is None or not tokenizer.has_chat_template):
        raise ConfigError("--backend openai-chat: MODEL has no tokenizer with a chat template")
    vocab_size = vocabulary_size(files)
    dataset = dataset_of(args, vocab_size, tokenizer)
    if args.url is None:
        _check_context(config, dataset.longest)
    if args.baseline == "transformers":
        _check_in_process(args, len(points))
    seed = args.seed
    if seed is None:  # a server that runs already may have cached the prompts of an earlier run
        seed = 0 if args.url is None else random_seed()
    return Load(
        dataset,
        points,
        seed,
        args.metric_percentiles,
        args.goodput or {},
        None if tokenizer is None or not is_chat else tokenizer.decode,
    )


def _check_context(config: EngineConfig, longest: int) -> None:
    from kiln.engine.models.registry import read_model

    model = config.model
    most = read_model(Path(model.model), model.quantization, model.overrides)[1].max_positions
    context = model.max_model_len or most
    if longest > context:
        raise ConfigError(
            f"a request has up to {longest} tokens, prompt and output, and the context is "
            f"{context}: measure shorter ones"
        )


def _check_in_process(args: argparse.Namespace, num_points: int) -> None:
    if num_points > 1 or any(map(math.isfinite, args.request_rate or ())):
        raise ConfigError(
            "--baseline transformers has no arrivals: leave out --request-rate, and give one "
            "--max-concurrency"
        )
    if args.backend != "openai" or dataset_name(args) == "sharegpt":
        raise ConfigError("--baseline transformers: runs token ids of --backend openai only")


def _measure_servers(
    args: argparse.Namespace, config: EngineConfig, python: str, load: Load
) -> Measured:
    from kiln.engine.bench.served_engine import ServedEngine
    from kiln.engine.bench.side_by_side import measure_all
    from kiln.engine.bench.vllm_server import version, vllm_server

    def vllm(log: ServerLog) -> Any:
        return vllm_server(config, python, log, args.ready_check_timeout_sec)

    own = "kiln" if args.url is None else urlsplit(server_url(args.url)).netloc
    makers = {own: lambda: ServedEngine(own, partial(_kiln, args, config))}
    if args.baseline == "vllm":
        makers["vllm"] = lambda: ServedEngine("vllm", vllm, version)

    def measure(engine: ServedEngine) -> Iterator[Row]:
        say(f"{engine.name}: ready at {engine.url} after {engine.load_seconds:.1f} s")
        key = args.api_key if engine.name == own else None
        with load_display() as shown:
            yield from engine.measure(
                load, shown, api_key=key, is_chat=args.backend == "openai-chat"
            )

    with _ended_by_sigterm():
        return measure_all(makers, measure, say)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Stop the servers before SIGTERM ends the process, as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _kiln(
    args: argparse.Namespace, config: EngineConfig, log: ServerLog
) -> Iterator[tuple[str, subprocess.Popen[Any] | None]]:
    """Yield the address of Kiln's server, and its process if it is started here."""
    from kiln.engine.cli.local_server import local_server

    if args.url is not None:
        yield server_url(args.url), None
        return
    # A server that ends must not serve the rest of the load from an engine that is new.
    flags = [config.model.model, *flags_of(args, ENGINE), "--max-restarts", "0"]
    if args.load_format is None:
        flags += ["--load-format", config.model.load_format]
    with local_server(flags, args.ready_check_timeout_sec, log=log.file) as (url, process):
        yield url, process


def _in_process(args: argparse.Namespace, config: EngineConfig, load: Load) -> list[Row]:
    """Return the rows of transformers, and of Kiln beside it if no server uses its GPU."""
    from kiln.engine.bench import in_process

    say("measuring transformers on the same prompts")
    point = load.points[0]
    at_a_time = point.arrivals.concurrency or CONCURRENCY
    # All requests are submitted at once.
    limits = replace(config.scheduler, max_num_seqs=at_a_time, max_waiting=sys.maxsize)
    samples = load.samples(0)
    prompts = [one.prompt for one in samples if isinstance(one.prompt, list)]
    lengths = [one.output_tokens for one in samples]
    config = replace(config, scheduler=limits)
    rows = in_process.measure(config, prompts, lengths, say, kiln=args.url is None)
    return [{**row, "load": str(point.arrivals)} for row in rows]


def _finish(args: argparse.Namespace, name: str, load: Load, measured: Measured) -> int:
    """Print the page, write the files, and return 0. Raises the error that ended the run early."""
    from kiln.engine.bench import serving_plot
    from kiln.engine.bench.machine import versions
    from kiln.engine.bench.report import Report, command_line
    from kiln.engine.bench.serving_report import markdown

    chat = load.text_of is not None
    about = {
        "dataset": str(load.dataset),
        "path": "/v1/chat/completions" if chat else "/v1/completions",
        "num_prompts": [point.num_prompts for point in load.points],
        "burstiness": args.burstiness if math.isfinite(args.burstiness) else "inf",
        "seed": load.seed,
        "percentiles": load.percentiles,
        "goals": load.goals,
    }
    ranks = args.tensor_parallel_size or 1
    details = {
        "model": name,
        "device": args.device or "auto",
        "load_seconds": measured.load_seconds,
        **({"limits": {"tensor_parallel_size": ranks}} if ranks > 1 else {}),
    }
    report = Report(
        _FILES[dataset_name(args)],
        command_line("kiln"),
        measured.rows,
        about,
        details,
        remark=measured.remark,
        versions=versions() | measured.versions,
    )
    text = markdown(report)
    files = partial(report.write_named, text=text, draw=serving_plot.draw)
    write_out(args, report, text, files)
    if measured.failure is not None:
        raise measured.failure
    return 0
