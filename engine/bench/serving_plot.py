"""The plot of the serving benchmark: latency over throughput, a line for each engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.plots import draw_throughput
from kiln.engine.bench.report import Report, Row, grouped
from kiln.engine.bench.style import LINES, Line, label_points, legend_below, log_axis, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = {"ttft": "time to first token, ms", "itl": "time between events, ms"}
_WIDE = 10.0  # the largest over the smallest value from which on an axis is logarithmic


def draw(report: Report, processor: str, figure: Figure) -> None:
    """Draw a curve for each engine; bars of throughput if there is one load only."""
    timed = [row for row in report.rows if "median_ttft_ms" in row and "median_itl_ms" in row]
    engines = grouped(timed, "engine")
    if max((len(rows) for rows in engines.values()), default=0) < 2:
        draw_throughput(report, processor, figure)
        return
    figure.set_size_inches(10, 4.8)
    panels = figure.subplots(1, len(_PANELS))
    high = max(report.load.get("percentiles") or (99,))
    for axes, (metric, title) in zip(panels, _PANELS.items(), strict=True):
        tail = f"p{high:g}_{metric}_ms"
        _scale(axes, metric, tail, timed)
        for line, (engine, rows) in zip(LINES, engines.items(), strict=False):
            _draw_line(axes, sorted(rows, key=_speed), metric, tail, line, engine)
        axes.set(xlabel="output tokens per second", title=title)
    _name_points(panels, engines)
    titled(
        figure,
        f"{report.details['model']} on {processor}: latency over throughput",
        f"{report.load['dataset']}; at each point: {_what(timed)}",
    )
    legend_below(figure, panels, 4)


def _speed(row: Row) -> float:
    return float(row["output_tokens_per_s"])


def _scale(axes: Any, metric: str, tail: str, rows: Sequence[Row]) -> None:
    """Set the limits of both axes, which the places of the labels depend on."""
    speeds = [_speed(row) for row in rows]
    times = [row[name] for row in rows for name in (f"median_{metric}_ms", tail) if row.get(name)]
    if times and max(times) > _WIDE * min(times):
        log_axis(axes.yaxis)
        axes.set_ylim(min(times) / 1.6, max(times) * 1.6)
    else:
        axes.set_ylim(0, 1.15 * max(times, default=1))
    axes.set_xlim(0, 1.12 * max(speeds))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.get_major_locator().set_params(nbins=6)


def _draw_line(
    axes: Any, rows: Sequence[Row], metric: str, tail: str, line: Line, engine: str
) -> None:
    speeds = [_speed(row) for row in rows]
    axes.plot(
        speeds, [row[f"median_{metric}_ms"] for row in rows], **line.look(),
        label=f"{engine}, median",
    )  # fmt: skip
    if all(tail in row for row in rows):
        faint = {**line.look(), "linewidth": 0.9, "markerfacecolor": "white", "alpha": 0.75}
        percent = tail.partition("_")[0]
        axes.plot(speeds, [row[tail] for row in rows], **faint, label=f"{engine}, {percent}")


def _name_points(panels: Sequence[Any], engines: dict[str, list[Row]]) -> None:
    """Write the rate or concurrency of each median beside it."""
    for axes, metric in zip(panels, _PANELS, strict=True):
        there: list[Any] = []
        for index, (line, rows) in enumerate(zip(LINES, engines.values(), strict=False)):
            points = [
                (_speed(row), row[f"median_{metric}_ms"], _short(row))
                for row in sorted(rows, key=_speed, reverse=True)
            ]
            label_points(axes, points, line.colour, -11 if index == 0 else 11, there)


def _short(row: Row) -> str:
    if row["request_rate"] is None:
        return "all" if row["max_concurrency"] is None else str(row["max_concurrency"])
    return f"{row['request_rate']:g}/s"


def _what(rows: Sequence[Row]) -> str:
    rates = any(row["request_rate"] is not None for row in rows)
    return "requests that arrive per second" if rates else "requests at a time"
