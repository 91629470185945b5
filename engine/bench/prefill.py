"""Prefill: prompt tokens per second by prompt length and token budget, and the GPU's busy share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.engine import BenchEngine, Tell
from kiln.engine.bench.plots import draw_groups
from kiln.engine.bench.report import Report, Row, over, table
from kiln.engine.bench.style import titled
from kiln.engine.bench.workload import equal_prompts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPTS = ((64, 256), (32, 2048), (8, 8000))  # how many arrive at once, and the tokens of each
_REPEATS = 2  # of each run; the fastest counts
_COLUMNS = {
    "engine": "{engine}",
    "token budget": "{budget}",
    "prompts": "{prompts}",
    "prompt tokens/s": "{tokens_per_s:,.0f}",
    "ms": "{ms:,.1f}",
    "GPU busy, ms": "{device_ms:,.1f}",
    "GPU busy": "{busy:.0%}",
    "Kiln's speed over this": "{ratio:.2f}×",
}
_DARKEST, _LIGHTEST = 0.75, 0.35  # of an engine's colour; a shade for each budget


def measure(
    engine: BenchEngine, load: Sequence[tuple[int, int]], vocab_size: int, tell: Tell
) -> Iterator[Row]:
    """Yield a row for each number and length of prompts, from which one token each is generated.

    Each run's time is the best of two after a warm-up, and each has other prompts, so that no
    prefix is cached. ``device_ms`` is that of a further run, because profiling makes launches
    slower; ``busy`` is its share of the best time. Both are None where they cannot be measured.
    ``asked_budget`` is None for the engine's own default. Raises BenchError.
    """
    for number, num_tokens in load:
        tell(f"{engine.name}, {engine.token_budget} tokens a step: {number} × {num_tokens}")
        drawn = (equal_prompts(number, num_tokens, vocab_size, seed) for seed in count())
        ones = [1] * number
        engine.run(next(drawn), ones)
        seconds = [engine.run(next(drawn), ones) for _ in range(_REPEATS)]
        device_ms = engine.device_ms(next(drawn), ones)
        yield {
            "engine": engine.name,
            "token_budget": engine.token_budget,
            "asked_budget": None if engine.own_budget else engine.token_budget,
            "num_prompts": number,
            "prompt_tokens": num_tokens,
            "tokens_per_s": number * num_tokens / min(seconds),
            "seconds": seconds,
            "device_ms": device_ms,
            "busy": over(device_ms, 1000 * min(seconds)),
        }


def markdown(report: Report) -> str:
    """Return the report's page."""
    on_cpu = report.details["device"] == "cpu"
    text = (
        "Prompts of random tokens that arrive at once, from which one token each is generated, "
        f"greedily; the best of {_REPEATS} runs. Token budget: the most tokens of a step; default: "
        "the engine's own. GPU busy: the union of its kernels and copies under torch's profiler, "
        "in a run of its own, and its share of the time; "
        + (
            "not given on a CPU."
            if on_cpu
            else "not given for vLLM, which runs in other processes."
        )
    )
    shown = table(_COLUMNS, map(_shown, report.rows))
    return report.markdown(f"Prefill of {report.details['model']}", text, shown)


def draw(report: Report, processor: str, figure: Figure) -> None:
    """Draw a bar for each row, with the tokens per second and the GPU's busy share above it."""
    from matplotlib import colormaps

    rows = [_shown(row) for row in report.rows]
    colours: dict[str, Any] = {}
    for engine in dict.fromkeys(row["engine"] for row in rows):
        labels = list(dict.fromkeys(row["label"] for row in rows if row["engine"] == engine))
        step = (_DARKEST - _LIGHTEST) / max(len(labels) - 1, 1)
        shades = colormaps["Oranges" if engine == "kiln" else "Greys"]
        colours |= {label: shades(_DARKEST - step * index) for index, label in enumerate(labels)}
    groups = len({row["prompts"] for row in rows})
    figure.set_size_inches(max(7.5, 3 + 0.55 * groups * len(colours)), 4.6)
    axes = figure.subplots()
    draw_groups(axes, rows, "prompts", "tokens_per_s", lambda row: str(row["text"]), colours)
    axes.set(xlabel="prompts × tokens of each", ylabel="prompt tokens per second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    title = f"Prefill of {report.details['model']} on {processor}"
    titled(figure, title, "in percent: the GPU's busy share, where it is known")
    figure.legend(title="engine, token budget", loc="outside right upper")


def _shown(row: Row) -> Row:
    """Return a row with the texts that the table and the plot show."""
    budget = f"{row['token_budget']:,}" + " (default)" * (row["asked_budget"] is None)
    busy = "" if row["busy"] is None else f"\n{row['busy']:.0%}"
    return row | {
        "budget": budget,
        "label": f"{row['engine']}, {budget}",
        "prompts": f"{row['num_prompts']} × {row['prompt_tokens']:,}",
        "ms": 1000 * min(row["seconds"]),
        "text": f"{row['tokens_per_s'] / 1000:,.3g}k{busy}",
    }
