"""What LoRA adapters cost a decode step, by their number, in one engine or two side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kiln.engine.bench import latency
from kiln.engine.bench.engine import BenchEngine, Tell
from kiln.engine.bench.latency import SHORT_RUN, LatencyLoad
from kiln.engine.bench.plots import draw_groups
from kiln.engine.bench.report import Report, Row, grouped, over, table, with_ratio
from kiln.engine.bench.style import KILN_COLOUR, OTHER_COLOUR, ROOF_COLOUR, legend_below, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (KILN_COLOUR, OTHER_COLOUR)
_COLUMNS = {
    "engine": "{engine}",
    "requests": "{batch_size}",
    "adapters": "{shown}",
    "ms a step": "{step_ms:.3f}",
    "growth": "{growth:+.1%}",
    "floor of the growth": "{growth_floor:+.1%}",
    "output tokens/s": "{output_tokens_per_s:,.0f}",
    "GPU busy, ms": "{device_ms:.3f}",
    "kernels a step": "{device_launches:,.0f}",
    "Kiln's speed over this": "{ratio:.2f}×",
}


@dataclass(frozen=True, slots=True)
class LoRALoad(LatencyLoad):
    """Batches of requests that use some number of distinct adapters, in turn.

    ``adapters``: these numbers; with 0 an engine has adapters, and no request uses one. ``rank``:
    of every adapter. A number above a batch size is left out there.
    """

    adapters: tuple[int, ...]
    rank: int

    @property
    def most(self) -> int:
        """How many adapters an engine must have, at least one; 0 if no batch has enough rows."""
        fit = [number for number in self.adapters if number <= max(self.batch_sizes)]
        return max(1, *fit) if fit else 0

    def with_room(self, number: int) -> LoRALoad | None:
        """Return the batches in which this many adapters can be used, if there are any."""
        sizes = tuple(size for size in self.batch_sizes if size >= number)
        return replace(self, batch_sizes=sizes) if sizes else None


def measure(engine: BenchEngine, load: LoRALoad, vocab_size: int, tell: Tell) -> Iterator[Row]:
    """Yield a row per number of adapters and batch size, with ``latency``'s fields.

    ``adapters`` is the number, or None in an engine without adapters, which has one row per batch
    size. Raises BenchError.
    """
    for number in load.adapters if engine.adapters else (None,):
        steps = load.with_room(number or 0)
        if steps is None:
            continue
        for row in latency.measure(engine, steps, vocab_size, tell, number or 0):
            of_lora = {"engine": engine.product, "adapters": number}
            if engine.adapters:
                of_lora["lora_backend"] = engine.lora_backend
            yield {**row, **of_lora}


def complete(rows: Iterable[Row], floor_ms: Callable[[int], float | None]) -> list[Row]:
    """Return the rows in order of batch size, with the fields that are computed from them.

    ``floor_ms``: the time of reading a number of adapters. ``growth``: how much longer a step is
    than that of the same engine without adapters, as a part of the latter. ``growth_floor``: what
    it would be if the adapters cost only the reading. ``ratio``: see
    ``with_ratio``.
    """
    rows = with_ratio(rows, "batch_size", "adapters")
    alone = {
        (row["engine"], row["batch_size"]): row["step_ms"]
        for row in rows
        if row["adapters"] is None
    }
    done = []
    for row in sorted(rows, key=lambda row: int(row["batch_size"])):
        number, base = row["adapters"], alone.get((row["engine"], row["batch_size"]))
        floor = None if number is None else floor_ms(number)
        grown = over(row["step_ms"], base)
        growth = None if number is None or grown is None else grown - 1
        found = {"growth": growth, "growth_floor": over(floor, base)}
        done.append({**row, "device_ms": row.get("device_ms"), **found})
    return done


def markdown(report: Report) -> str:
    """Return the report's page."""
    load, details = report.load, report.details
    text = (
        f"Requests of {load['prompt_tokens']} random tokens, greedy, all in every step, which use "
        f"the adapters in turn; each adapter has rank {load['rank']} on all projections of "
        f"attention and MLP, {load['adapter_bytes'] / 1e6:,.1f} MB in {details['dtype']}. A "
        f"step is the difference between runs of {SHORT_RUN + load['output_tokens']} and "
        f"{SHORT_RUN} new tokens over {load['output_tokens']}, each the best of "
        f"{latency.REPEATS}. Adapters: how many differ in a step. Without: the engine is built "
        f"for none. 0: it has {load['num_adapters']}, and no request uses one. Growth: over the "
        "step of the same engine without."
    )
    copied = details.get("copy_bytes_s")
    if copied:
        text += (
            " Floor of the growth: the bytes of the adapters in use, at the "
            f"{copied / 1e12:.2f} TB/s that copies reach on this GPU. GPU busy: the union of its "
            "kernels and copies under torch's profiler. Kernels a step: those and the copies."
        )
    backends = {row["engine"]: row["lora_backend"] for row in report.rows if "lora_backend" in row}
    text += "".join(
        f" What computes the adapters in {engine}: {backend}."
        for engine, backend in backends.items()
        if backend
    )
    shown = [
        {**row, "shown": "without" if row["adapters"] is None else row["adapters"]}
        for row in report.rows
    ]
    return report.markdown(
        f"LoRA in decode steps of {details['model']}", text, table(_COLUMNS, shown)
    )


def draw(report: Report, processor: str, figure: Figure) -> None:
    """Draw a panel per batch size, in it a group of bars per number of adapters, one an engine."""
    panels = grouped((row for row in report.rows if row["growth"] is not None), "batch_size")
    engines = list(dict.fromkeys(row["engine"] for rows in panels.values() for row in rows))
    groups = [len({row["adapters"] for row in rows}) for rows in panels.values()]
    figure.set_size_inches(max(6.5, 1.2 + 0.55 * sum(groups) * max(2, len(engines))), 4.4)
    titled(
        figure,
        f"What LoRA adapters of rank {report.load['rank']} add to a decode step",
        f"{report.details['model']} on {processor}",
    )
    if not panels:  # the run ended before there was anything to compare
        return
    # Every bar has the same width, whatever the number of groups in its panel.
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=groups)[0]
    for axes, (size, rows) in zip(drawn, panels.items(), strict=True):
        _draw_panel(axes, rows, engines)
        axes.set_title(f"{size} {'request' if size == 1 else 'requests'}")
    drawn[0].set_ylabel("growth of a step over the same\nengine without LoRA, %")
    legend_below(figure, drawn, 3)


def _draw_panel(axes: Any, rows: Sequence[Row], engines: Sequence[str]) -> None:
    shown = [
        row | {"label": row["engine"], "percent": 100 * row["growth"]}
        for row in sorted(rows, key=lambda row: int(row["adapters"]))
    ]
    colours = dict(zip(engines, _COLOURS, strict=False))
    drawn = draw_groups(
        axes, shown, "adapters", "percent", lambda row: f"{row['percent']:+.1f}", colours
    )
    floors = [(100 * row["growth_floor"], bar) for row, bar in drawn if row["growth_floor"]]
    if floors:
        axes.hlines(
            [floor for floor, _ in floors],
            [bar.get_x() for _, bar in floors],
            [bar.get_x() + bar.get_width() for _, bar in floors],
            colors=ROOF_COLOUR,
            linewidth=1.5,
            label="floor: the adapters' bytes at copy bandwidth",
        )
    axes.axhline(0, color=ROOF_COLOUR, linewidth=0.8)
    axes.set_xlabel("adapters in a step")
