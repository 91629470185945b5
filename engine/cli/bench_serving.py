"""``kiln bench serving``: one server under load, then a baseline on the same prompts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kiln.engine.cli import bench_report
from kiln.engine.cli.load_client import Measured, run_load
from kiln.engine.cli.local_server import local_server
from kiln.engine.cli.options import engine_flags, find_model, served_name
from kiln.engine.errors import ConfigError
from kiln.engine.model_folder import read_json

_WARM_UP_TOKENS = 4


def bench_serving(args: argparse.Namespace) -> int:
    """Measure, print the table, write the files, and return 0. Raises KilnError."""
    for name in ("num_prompts", "concurrency", "prompt_tokens", "output_tokens"):
        if getattr(args, name) < 1:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: must be 1 or more"
            )
    prompts = make_prompts(args.num_prompts, args.prompt_tokens, _vocabulary(args))
    rows = [_measure_kiln(args, prompts)]
    if args.baseline == "transformers":
        _say("measuring transformers on the same prompts")
        # Here and not above: torch and transformers must not take the server's cores.
        from kiln.engine.cli import bench_baseline, bench_offline

        what = (find_model(args), prompts, args.output_tokens, args.dtype, args.device)
        rows += bench_baseline.measure(*what, args.concurrency)
        if args.url is None:  # else the server still holds the GPU
            rows.append(bench_offline.measure(*what, args.concurrency))
    report = bench_report.make(served_name(args), rows, _load_of(args))
    print(bench_report.markdown(report))
    if args.output is not None:
        for path in bench_report.write(report, args.output):
            _say(f"wrote {path}")
    return 0


def make_prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Return random prompts of a quarter to the whole of ``longest`` tokens, always the same."""
    draw = random.Random(0)
    return [
        [draw.randrange(vocabulary) for _ in range(draw.randint(max(1, longest // 4), longest))]
        for _ in range(count)
    ]


def summarise(seconds: float, answers: Sequence[Measured]) -> dict[str, float]:
    """Return the numbers of one run; latencies in milliseconds.

    The time between tokens is between two events of a stream: a token whose text is held back,
    as part of a character is, comes with the next.
    """
    first = [1000 * (one.events[0] - one.started) for one in answers if one.events]
    between = [
        1000 * (late - early)
        for one in answers
        for early, late in zip(one.events, one.events[1:], strict=False)
    ]
    tokens = sum(one.output_tokens for one in answers)
    return {
        "requests": len(answers),
        "seconds": seconds,
        "prompt_tokens": sum(one.prompt_tokens for one in answers),
        "output_tokens": tokens,
        "output_tokens_per_s": tokens / seconds,
        "requests_per_s": len(answers) / seconds,
        **_quantiles("ttft_ms", first),
        **_quantiles("inter_token_ms", between),
    }


def _measure_kiln(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    fixed = {"temperature": 0, "ignore_eos": True}
    count = args.output_tokens
    bodies = [
        {"prompt": prompt, "max_tokens": count, "min_tokens": count, **fixed} for prompt in prompts
    ]
    warm = [
        {**body, "max_tokens": _WARM_UP_TOKENS, "min_tokens": 0}
        for body in bodies[: args.concurrency]
    ]
    with _server(args) as url:
        asyncio.run(run_load(url, warm, args.concurrency))
        _say(f"measuring {url}")
        seconds, answers = asyncio.run(run_load(url, bodies, args.concurrency))
    expected = count * len(prompts)
    row = summarise(seconds, answers)
    if row["output_tokens"] != expected:
        raise ConfigError(
            f"{row['output_tokens']} output tokens, not {expected}: nothing to compare"
        )
    return {"name": f"kiln, {args.concurrency} streams", **row}


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """Yield the address of the server to measure."""
    if args.url is not None:
        yield args.url.rstrip("/").removesuffix("/v1")
        return
    _say("starting a server")
    with local_server(engine_flags(args)) as (url, _):
        yield url


def _vocabulary(args: argparse.Namespace) -> int:
    """Return how many tokens the model's config names."""
    config = read_json(find_model(args) / "config.json")
    size = config.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ConfigError(f"{args.model}: config.json has no vocab_size to draw prompts from")
    return size


def _load_of(args: argparse.Namespace) -> dict[str, Any]:
    names = ("num_prompts", "concurrency", "prompt_tokens", "output_tokens")
    return {name: getattr(args, name) for name in names}


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_median": cuts[49], f"{name}_p99": cuts[98]}


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
