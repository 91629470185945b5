"""The time of one decode step at several batch sizes, for one engine or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.engine import Adapters, BenchEngine, Tell
from kiln.engine.bench.report import Report, Row, grouped, over, table, with_ratio
from kiln.engine.bench.style import (
    LINES,
    ROOF_COLOUR,
    Line,
    label_points,
    legend_below,
    log_axis,
    titled,
)
from kiln.engine.bench.workload import equal_prompts, warm_up_load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHORT_RUN = 8  # output tokens of the shorter run
REPEATS = 2  # of each run; the fastest counts
_PROFILED_STEPS = 16
_COLUMNS = {
    "engine": "{engine}",
    "requests": "{batch_size}",
    "ms a step": "{step_ms:.3f}",
    "output tokens/s": "{output_tokens_per_s:,.0f}",
    "GPU busy, ms": "{device_ms:.3f}",
    "GPU idle, ms": "{idle_ms:.3f}",
    "floor, ms": "{floor_ms:.3f}",
    "floor / step": "{share:.0%}",
    "Kiln's speed over this": "{ratio:.2f}×",
}


@dataclass(frozen=True, slots=True)
class LatencyLoad:
    """A batch of identical requests, run once for each batch size."""

    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int

    @property
    def largest(self) -> int:
        """The most requests that run together."""
        return max(self.batch_sizes)

    @property
    def longest(self) -> int:
        """The tokens of a request in the longer run, prompt and output."""
        return self.prompt_tokens + SHORT_RUN + self.output_tokens

    @property
    def context(self) -> int:
        """The mean number of tokens before the step, over the measured steps."""
        return self.prompt_tokens + SHORT_RUN + self.output_tokens // 2


def measure(
    engine: BenchEngine, load: LatencyLoad, vocab_size: int, tell: Tell, num_adapters: int = 0
) -> Iterator[Row]:
    """Yield a row per batch size. Its requests use the first ``num_adapters`` adapters in turn.

    One step takes the difference between a run of ``SHORT_RUN + output_tokens`` new tokens and one
    of ``SHORT_RUN``, over ``output_tokens``. Each run's time is the best of two after a warm-up.
    ``step_ms`` is None if the load is too short to see a difference. Raises BenchError.
    """
    name = engine.name + (f" ({num_adapters} in use)" if engine.adapters else "")
    in_turn = engine.adapters[:num_adapters]
    tell(f"{name}: warm-up")
    prompts, lengths = warm_up_load(load.prompt_tokens, load.output_tokens, vocab_size)
    engine.run(prompts, lengths, _spread(in_turn, len(prompts)))
    for size in load.batch_sizes:
        tell(f"{name}: batch size {size}")
        prompts = equal_prompts(size, load.prompt_tokens, vocab_size)
        yield _measure_size(engine, load, prompts, _spread(in_turn, size))


def _spread(in_turn: Sequence[str], count: int) -> Adapters:
    return list(islice(cycle(in_turn), count)) or None


def _measure_size(
    engine: BenchEngine, load: LatencyLoad, prompts: list[list[int]], adapters: Adapters
) -> Row:
    size, steps = len(prompts), min(_PROFILED_STEPS, load.output_tokens)

    def run(length: int) -> float:
        return engine.run(prompts, [length] * size, adapters)

    run(SHORT_RUN)
    short = [run(SHORT_RUN) for _ in range(REPEATS)]
    long = [run(SHORT_RUN + load.output_tokens) for _ in range(REPEATS)]
    seconds = min(long) - min(short)
    timed = seconds > 0
    # The profiled steps have the same mean context as the timed ones.
    skipped = SHORT_RUN + (load.output_tokens - steps) // 2
    return {
        "engine": engine.name,
        "batch_size": size,
        "step_ms": 1000 * seconds / load.output_tokens if timed else None,
        "output_tokens_per_s": size * load.output_tokens / seconds if timed else None,
        "short_seconds": short,
        "long_seconds": long,
        **engine.step_details(prompts, skipped, steps, adapters),
    }


def complete(rows: Iterable[Row], floor_ms: Callable[[int], float | None]) -> list[Row]:
    """Return the rows in order of batch size, with the fields that are computed from them.

    ``floor_ms``: the shortest possible step. ``share``: that floor divided by the step.
    ``idle_ms``: the part of a step in which the GPU does nothing. ``ratio``: see
    ``with_ratio``.
    """
    return [
        row | _of_the_step(row["step_ms"], row.get("device_ms"), floor_ms(row["batch_size"]))
        for row in sorted(with_ratio(rows, "batch_size"), key=lambda row: int(row["batch_size"]))
    ]


def _of_the_step(step: float | None, device: float | None, floor: float | None) -> Row:
    idle = None if step is None or device is None else step - device
    return {"device_ms": device, "idle_ms": idle, "floor_ms": floor, "share": over(floor, step)}


def markdown(report: Report) -> str:
    """Return the report's page."""
    load = report.load
    text = (
        f"Requests of {load['prompt_tokens']} random tokens, greedy, all in every step. A step is "
        f"the difference between runs of {SHORT_RUN + load['output_tokens']} and {SHORT_RUN} new "
        f"tokens over {load['output_tokens']}, each the best of {REPEATS}; the mean context is "
        f"{load['context']} tokens."
    )
    copied = report.details.get("copy_bytes_s")
    if copied:
        text += (
            " GPU busy: the union of its kernels and copies under torch's profiler. Floor: the "
            f"bytes of weights ({report.details['dtype']}), keys and values "
            f"({report.details['kv_dtype']}) that a step must read, at the "
            f"{copied / 1e12:.2f} TB/s that copies reach on this GPU."
        )
    return report.markdown(
        f"Decode steps of {report.details['model']}", text, table(_COLUMNS, report.rows)
    )


def draw(report: Report, processor: str, figure: Figure) -> None:
    """Draw output tokens per second over the batch size: a line per engine, and the floor."""
    rows = report.rows
    figure.set_size_inches(7.5, 5)
    axes = figure.subplots()
    for axis in (axes.xaxis, axes.yaxis):
        log_axis(axis)
    lines = grouped((row for row in rows if row["output_tokens_per_s"]), "engine")
    for line, (engine, timed) in zip(LINES, lines.items(), strict=False):
        axes.plot(*zip(*_points(timed), strict=True), **line.look(), label=engine)
    floors = {row["batch_size"]: row["floor_ms"] for row in rows if row["floor_ms"]}
    if floors:
        limits = [1000 * size / floor for size, floor in floors.items()]
        label = "floor: the bytes at copy bandwidth"
        axes.plot(list(floors), limits, color=ROOF_COLOUR, linestyle=":", linewidth=1, label=label)
    sizes = sorted({row["batch_size"] for row in rows})
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.margins(x=0.1, y=0.12)
    axes.set(xlabel="requests", ylabel="output tokens per second")
    _write_speeds(axes, lines)
    titled(figure, f"Decode steps of {report.details['model']} on {processor}")
    legend_below(figure, [axes], 4)


def _points(rows: Sequence[Row]) -> list[tuple[int, float]]:
    return [(row["batch_size"], row["output_tokens_per_s"]) for row in rows]


def _write_speeds(axes: Any, lines: Mapping[str, Sequence[Row]]) -> None:
    """Write the numbers of the fastest engine above its line, those of the others below theirs."""
    fastest = max(lines, default="", key=lambda engine: lines[engine][-1]["output_tokens_per_s"])
    there: list[Any] = []
    looks: dict[str, Line] = dict(zip(lines, LINES, strict=False))
    for engine in sorted(looks, key=lambda engine: engine != fastest):
        texts = [(size, speed, f"{speed:,.0f}") for size, speed in _points(lines[engine])]
        label_points(axes, texts, looks[engine].colour, 12 if engine == fastest else -13, there)
