"""Plots that several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.report import Report, Row
from kiln.engine.bench.style import KILN_COLOUR, OTHER_COLOUR, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GROUP = 0.8  # the width of all bars of a group


def draw_throughput(report: Report, processor: str, figure: Figure) -> None:
    """Draw output tokens per second, one bar per row, the first on top."""
    rows = report.rows
    figure.set_size_inches(8, 1.2 + 0.6 * len(rows))
    axes = figure.subplots()
    colours = [OTHER_COLOUR] * (len(rows) - 1) + [KILN_COLOUR]
    upwards = rows[::-1]
    bars = axes.barh(
        [row["engine"] for row in upwards],
        [row["output_tokens_per_s"] for row in upwards],
        color=colours,
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.set_xlabel("output tokens per second")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0.12)
    titled(figure, f"{report.details['model']} on {processor}")


def draw_groups(
    axes: Any,
    rows: Sequence[Row],
    group: str,
    value: str,
    text: Callable[[Row], str],
    colours: Mapping[str, Any],
) -> list[tuple[Row, Any]]:
    """Draw a bar for each row, with a text above it; return each row with its bar.

    Rows with the same ``group`` field are beside each other, in the order of ``colours``, which
    has the ``label`` of every row. ``value``: the field with the bar's height.
    """
    groups = list(dict.fromkeys(row[group] for row in rows))
    width = _GROUP / len(colours)
    drawn: list[tuple[Row, Any]] = []
    for index, (label, colour) in enumerate(colours.items()):
        own = [row for row in rows if row["label"] == label]
        middle = width * (index + 0.5) - _GROUP / 2
        left = [groups.index(row[group]) + middle for row in own]
        bars = axes.bar(left, [row[value] for row in own], 0.92 * width, color=colour, label=label)
        axes.bar_label(bars, [text(row) for row in own], padding=2, fontsize=8)
        drawn += zip(own, bars, strict=True)
    axes.set_xticks(range(len(groups)), [str(one) for one in groups])
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.15)
    return drawn
