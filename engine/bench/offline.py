"""Requests of random lengths, all submitted at once: output tokens per second."""

from __future__ import annotations

from collections.abc import Iterator

from kiln.engine.bench.engine import BenchEngine, Tell
from kiln.engine.bench.report import Report, Row, table
from kiln.engine.bench.workload import MixedLoad, throughput, warm_up_load

_COLUMNS = {
    "engine": "{engine}",
    "output tokens/s": "{output_tokens_per_s:,.0f}",
    "requests/s": "{requests_per_s:.2f}",
    "seconds": "{seconds:.2f}",
    "Kiln's speed over this": "{ratio:.2f}×",
}


def measure(engine: BenchEngine, load: MixedLoad, vocab_size: int, tell: Tell) -> Iterator[Row]:
    """Yield one row: a run of the whole load after a short warm-up. Raises BenchError."""
    tell(f"{engine.name}: warm-up")
    engine.run(*warm_up_load(load.prompt_tokens[0], load.output_tokens[0], vocab_size))
    prompts, lengths = load.draw(vocab_size)
    tell(f"{engine.name}: {len(prompts)} requests, {sum(lengths):,} tokens to generate")
    seconds = engine.run(prompts, lengths)
    numbers = throughput(len(prompts), sum(map(len, prompts)), sum(lengths), seconds)
    yield {"engine": engine.name, **numbers}


def markdown(report: Report) -> str:
    """Return the report's page."""
    load, row = report.load, report.rows[0]
    text = (
        f"{load['num_prompts']} requests of {_range(load['prompt_tokens'])} random tokens, "
        f"{_range(load['output_tokens'])} output tokens each, greedy, all submitted at once: "
        f"{row['prompt_tokens']:,} tokens in, {row['output_tokens']:,} out."
    )
    title = f"Offline throughput of {report.details['model']}"
    return report.markdown(title, text, table(_COLUMNS, report.rows))


def _range(lengths: tuple[int, int]) -> str:
    return f"{lengths[0]} to {lengths[1]}"
