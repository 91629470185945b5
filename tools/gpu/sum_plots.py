"""Plots of the times of sums over ranks: microseconds by message size, a panel for each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.report import Row
from kiln.engine.bench.style import KILN_COLOUR, Line, log_axis, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECTIONS = {
    "all_reduce_latency": "virtual ranks of one GPU, without links",
    "latency": "a GPU for each rank, the slowest rank",
}
_SHOWN = (2, 4, 8)  # numbers of ranks, where there are more
_SOLID, _DASHED = "-", "--"
_LINES = {
    "one_shot_push": Line(KILN_COLOUR, _SOLID, "o"),
    "two_shot_push": Line("#e69f00", _SOLID, "s"),
    "one_shot_pull": Line("#0072b2", _SOLID, "^"),
    "two_shot": Line("#009e73", _SOLID, "D"),
    "auto": Line("#111827", ":", ""),
    "torch": Line("#6b7280", _DASHED, "v"),
    "symm_mem one-shot": Line("#cc79a7", _DASHED, "P"),
    "symm_mem two-shot": Line("#56b4e9", _DASHED, "X"),
}
_UNITS = ((1 << 20, "MB"), (1 << 10, "KB"))
_TICKS = 4  # the binary logarithm of the factor between two labels of the sizes


def draw_times(rows: Sequence[Row], where: str, figure: Figure) -> None:
    """Draw the rows of a section: a line for each way to sum, a panel for each number of ranks."""
    worlds = sorted({row["ranks"] for row in rows})
    if len(worlds) > len(_SHOWN):
        worlds = [world for world in worlds if world in _SHOWN]
    figure.set_size_inches(2.6 + 3.4 * len(worlds), 4.4)
    panels = figure.subplots(1, len(worlds), sharey=True, squeeze=False)[0]
    for axes, world in zip(panels, worlds, strict=True):
        _draw_panel(axes, [row for row in rows if row["ranks"] == world])
        axes.set_title(f"{world} ranks")
    panels[0].set_ylabel("microseconds")
    handles, labels = panels[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    titled(figure, "Times of a sum over ranks", where)


def _draw_panel(axes: Any, rows: Sequence[Row]) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        log_axis(axis)
    for name, line in _LINES.items():
        points = [(row["bytes"], row[name]) for row in rows if isinstance(row.get(name), float)]
        if points:
            above = {"markersize": 3.5, "zorder": 3 if name == "auto" else 2}
            axes.plot(*zip(*points, strict=True), label=name, **line.look(), **above)
    axes.set(xlabel="bytes of a message")
    sizes = [row["bytes"] for row in rows]
    first, last = min(sizes).bit_length() - 1, max(sizes).bit_length()
    ticks = [1 << power for power in range(first, last, _TICKS)]
    axes.set_xticks(ticks, [_size(size) for size in ticks])


def _size(num_bytes: int) -> str:
    for one, unit in _UNITS:
        if num_bytes >= one:
            return f"{num_bytes / one:g} {unit}"
    return f"{num_bytes} B"
