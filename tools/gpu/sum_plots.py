"""Plots of the times of sums over ranks: microseconds by message size, a panel for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECTIONS = {
    "all_reduce_latency": "virtual ranks of one GPU, without links",
    "latency": "a GPU for each rank, the slowest rank",
}
_SHOWN = (2, 4, 8)  # numbers of ranks, where there are more
_SOLID, _DASHED = "-", "--"
_LINES = {
    "one_shot_push": ("#c2410c", _SOLID),
    "two_shot_push": ("#e69f00", _SOLID),
    "one_shot_pull": ("#0072b2", _SOLID),
    "two_shot": ("#009e73", _SOLID),
    "auto": ("#111827", ":"),
    "torch": ("#6b7280", _DASHED),
    "symm_mem one-shot": ("#cc79a7", _DASHED),
    "symm_mem two-shot": ("#56b4e9", _DASHED),
}
_UNITS = ((1 << 20, "MB"), (1 << 10, "KB"))


def draw_times(rows: Sequence[Row], title: str, figure: Figure) -> None:
    """Draw the rows of a section: a line for each way to sum, a panel for each number of ranks."""
    worlds = sorted({row["ranks"] for row in rows})
    if len(worlds) > len(_SHOWN):
        worlds = [world for world in worlds if world in _SHOWN]
    figure.set_size_inches(1.6 + 3.4 * len(worlds), 4.2)
    panels = figure.subplots(1, len(worlds), sharey=True, squeeze=False)[0]
    for axes, world in zip(panels, worlds, strict=True):
        _draw_panel(axes, [row for row in rows if row["ranks"] == world])
        axes.set_title(f"{world} ranks", fontsize=10)
    panels[0].set_ylabel("microseconds of a sum")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=10)


def _draw_panel(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    for name, (colour, style) in _LINES.items():
        points = [(row["bytes"], row[name]) for row in rows if isinstance(row.get(name), float)]
        if points:
            axes.plot(
                *zip(*points, strict=True), label=name, color=colour, linestyle=style,
                marker="o", markersize=3.5, linewidth=1.6,
            )  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="message")
    sizes = sorted({row["bytes"] for row in rows})[::2]
    axes.set_xticks(sizes, [_size(size) for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _size(num_bytes: int) -> str:
    for one, unit in _UNITS:
        if num_bytes >= one:
            return f"{num_bytes / one:g} {unit}"
    return f"{num_bytes} B"
