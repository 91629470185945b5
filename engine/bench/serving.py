"""The serving benchmark: the load of concurrent streams, the row of numbers, and the report.

Nothing here imports torch before the load ends: the server needs every core.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kiln.engine.bench.load_client import Arrivals, LoadError, Measured, run_load
from kiln.engine.bench.plots import draw_throughput
from kiln.engine.bench.report import Report, Row, table
from kiln.engine.errors import ModelError
from kiln.engine.models.model_folder import read_json

_WARM_UP_TOKENS = 4
_WARM_UP_STREAMS = 16  # of an open loop without a limit
_COLUMNS = {
    "": "{name}",
    "output tokens/s": "{output_tokens_per_s:,.0f}",
    "requests/s": "{requests_per_s:.2f}",
    "TTFT ms, median": "{ttft_ms_median:.1f}",
    "TTFT ms, p99": "{ttft_ms_p99:.1f}",
    "between tokens ms, median": "{inter_token_ms_median:.2f}",
    "between tokens ms, p99": "{inter_token_ms_p99:.2f}",
    "threads": "{threads}",
    "first row is faster by": "{kiln_is_faster_by:.1f}×",
}


def make_prompts(folder: Path, count: int, longest: int) -> list[list[int]]:
    """Return random prompts for a model, each of ``longest / 4`` to ``longest`` tokens.

    They are the same in every run. Raises ModelError if config.json names no vocabulary.
    """
    vocabulary = read_json(folder / "config.json").get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ModelError(f"{folder}: config.json has no vocab_size to draw prompts from")
    draw = random.Random(0)
    return [
        [draw.randrange(vocabulary) for _ in range(draw.randint(max(1, longest // 4), longest))]
        for _ in range(count)
    ]


def measure(
    url: str,
    prompts: Sequence[list[int]],
    output_tokens: int,
    arrivals: Arrivals,
    api_key: str | None = None,
) -> Row:
    """Return the row of a server: greedy decoding of exactly ``output_tokens`` tokens per request.

    Raises LoadError if a response is incomplete.
    """
    fixed = {"temperature": 0, "ignore_eos": True, "min_tokens": output_tokens}
    bodies = [{"prompt": prompt, "max_tokens": output_tokens, **fixed} for prompt in prompts]
    together = arrivals.concurrency or _WARM_UP_STREAMS
    warm = [{**body, "max_tokens": _WARM_UP_TOKENS, "min_tokens": 0} for body in bodies[:together]]
    asyncio.run(run_load(url, warm, Arrivals(together), api_key))
    seconds, answers = asyncio.run(run_load(url, bodies, arrivals, api_key))
    row = {"name": f"kiln, {_load_name(arrivals)}", **summarise(seconds, answers)}
    if row["output_tokens"] != (expected := output_tokens * len(prompts)):
        raise LoadError(f"{row['output_tokens']} output tokens, not {expected}: nothing to compare")
    return row


def _load_name(arrivals: Arrivals) -> str:
    streams = "" if arrivals.concurrency is None else f"{arrivals.concurrency} streams"
    if arrivals.rate is None:
        return streams
    return f"{arrivals.rate:g} requests/s" + (f", at most {streams}" if streams else "")


def describe(arrivals: Arrivals) -> str:
    """Return how requests arrive, for the report."""
    limit = "" if arrivals.concurrency is None else f"{arrivals.concurrency} at a time"
    if arrivals.rate is None:
        return limit
    random_times = f"{arrivals.rate:g} a second at random times (Poisson)"
    return random_times + (f", at most {limit}" if limit else "")


def summarise(seconds: float, answers: Sequence[Measured]) -> Row:
    """Return the numbers of one run; latencies in milliseconds.

    The time between tokens is the time between two events of a stream. A token that ends inside a
    character has no event of its own: its text is sent with the next token.
    """
    first = [1000 * (one.events[0] - one.started) for one in answers if one.events]
    between = [
        1000 * (late - early)
        for one in answers
        for early, late in zip(one.events, one.events[1:], strict=False)
    ]
    prompt_tokens = sum(one.prompt_tokens for one in answers)
    return {
        **throughput(
            len(answers), prompt_tokens, sum(one.output_tokens for one in answers), seconds
        ),
        **_quantiles("ttft_ms", first),
        **_quantiles("inter_token_ms", between),
    }


def throughput(requests: int, prompt_tokens: int, output_tokens: int, seconds: float) -> Row:
    """Return the fields that every row of a serving benchmark has: counts and rates."""
    return {
        "requests": requests,
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds,
        "requests_per_s": requests / seconds,
    }


def make_report(command: str, model: str, rows: Sequence[Row], load: Mapping[str, Any]) -> Report:
    """Return the report of a run. The first row is Kiln's; ratios compare tokens/s to it."""
    first = rows[0]["output_tokens_per_s"]
    others = [{**row, "kiln_is_faster_by": first / row["output_tokens_per_s"]} for row in rows[1:]]
    return Report("serving", command, [rows[0], *others], load, {"model": model})


def markdown(report: Report) -> str:
    """Return the report's page."""
    load = report.load
    return report.markdown(
        f"Serving {report.details['model']}",
        f"One run: {load['num_prompts']} prompts of up to {load['prompt_tokens']} random tokens, "
        f"{load['output_tokens']} output tokens each, greedy, {load['arrivals']}.",
        table(_COLUMNS, report.rows),
    )


def write(report: Report, folder: Path) -> list[Path]:
    """Write JSON, page and plot, named for the model and the device, and return their paths."""
    place = "cpu" if report.hardware["gpu"] == "none" else "gpu"
    name = re.sub(r"[^\w.-]+", "-", f"serving-{report.details['model']}-{place}")
    title = f"{report.details['model']} on {report.hardware[place]}"
    draw = partial(draw_throughput, report.rows, "name", title)
    return report.write(folder, name, markdown(report), {f"{name}.png": draw})


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_median": cuts[49], f"{name}_p99": cuts[98]}
