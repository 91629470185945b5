"""The serving benchmark: the load of concurrent streams, the row of numbers, and the report.

Nothing here imports torch before the load ends: the server needs every core.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence

from kiln.engine.bench.load_client import Arrivals, LoadError, Measured, run_load
from kiln.engine.bench.report import Report, Row, table
from kiln.engine.bench.workload import MixedLoad, throughput
from kiln.engine.models.model_folder import ModelFiles
from kiln.engine.models.registry import vocabulary_size

_CHANCE = random.SystemRandom()
_WARM_UP_TOKENS = 4
_WARM_UP_STREAMS = 16  # of an open loop without a limit
_COLUMNS = {
    "": "{engine}",
    "output tokens/s": "{output_tokens_per_s:,.0f}",
    "requests/s": "{requests_per_s:.2f}",
    "TTFT ms, median": "{ttft_ms_median:.1f}",
    "TTFT ms, p99": "{ttft_ms_p99:.1f}",
    "between tokens ms, median": "{inter_token_ms_median:.2f}",
    "between tokens ms, p99": "{inter_token_ms_p99:.2f}",
    "threads": "{threads}",
    "Kiln's speed over this": "{ratio:.1f}×",
}


def make_prompts(files: ModelFiles, count: int, longest: int) -> list[list[int]]:
    """Return random prompts for a model, each of ``longest / 4`` to ``longest`` tokens.

    They are the same in every run. Raises ModelError if the size of its vocabulary is unknown.
    """
    return MixedLoad(count, (max(1, longest // 4), longest)).draw(vocabulary_size(files))[0]


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
    fixed["max_tokens"] = output_tokens
    bodies = [{"prompt": _rotated(prompt), **fixed} for prompt in prompts]
    together = arrivals.concurrency or _WARM_UP_STREAMS
    short = {**fixed, "max_tokens": _WARM_UP_TOKENS, "min_tokens": 0}
    warm = [{"prompt": _rotated(prompt), **short} for prompt in prompts[:together]]
    asyncio.run(run_load(url, warm, Arrivals(together), api_key))
    seconds, answers = asyncio.run(run_load(url, bodies, arrivals, api_key))
    row = {"engine": f"kiln, {describe(arrivals)}", **summarise(seconds, answers)}
    if row["output_tokens"] != (expected := output_tokens * len(prompts)):
        raise LoadError(f"{row['output_tokens']} output tokens, not {expected}: nothing to compare")
    return row


def _rotated(prompt: list[int]) -> list[int]:
    """Return the tokens from another one on, so that no cache of prefixes knows them."""
    start = _CHANCE.randrange(len(prompt))
    return prompt[start:] + prompt[:start]


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


def markdown(report: Report) -> str:
    """Return the report's page."""
    load = report.load
    return report.markdown(
        f"Serving {report.details['model']}",
        f"One run: {load['num_prompts']} prompts of up to {load['prompt_tokens']} random tokens, "
        f"{load['output_tokens']} output tokens each, greedy, {load['arrivals']}.",
        table(_COLUMNS, report.rows),
    )


def _quantiles(name: str, values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {f"{name}_median": cuts[49], f"{name}_p99": cuts[98]}
