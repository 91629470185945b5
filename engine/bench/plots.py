"""Plots that several benchmarks share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KILN_COLOUR = "#c2410c"
OTHER_COLOUR = "#a99e91"
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
    axes.set_title(f"{report.details['model']} on {processor}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)


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
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    return drawn


def legend_below(figure: Figure, panels: Sequence[Any], columns: int, size: int = 10) -> None:
    """Draw one legend for all panels, below them; each label once, in the order of the panels."""
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center", fontsize=size, frameon=False,
        ncols=max(1, min(len(handles), columns)),
    )  # fmt: skip
