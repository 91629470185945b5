"""The plot of ``kiln bench lora``: how much longer a step is, by the number of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.plots import KILN_COLOUR, OTHER_COLOUR, draw_groups, legend_below
from kiln.engine.bench.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (KILN_COLOUR, OTHER_COLOUR)
_FLOOR_COLOUR = "#1f2937"


def draw(report: Report, processor: str, figure: Figure) -> None:
    """Draw a panel per batch size, in it a group of bars per number of adapters, one an engine."""
    panels: dict[int, list[Row]] = {}
    for row in report.rows:
        if row["growth"] is not None:
            panels.setdefault(row["batch_size"], []).append(row)
    engines = list(dict.fromkeys(row["engine"] for rows in panels.values() for row in rows))
    groups = [len({row["adapters"] for row in rows}) for rows in panels.values()]
    figure.set_size_inches(max(6.5, 1.2 + 0.55 * sum(groups) * max(2, len(engines))), 4.4)
    figure.suptitle(
        f"What LoRA adapters of rank {report.load['rank']} add to a decode step\n"
        f"{report.details['model']} on {processor}",
        fontsize=11,
    )
    if not panels:  # the run ended before there was anything to compare
        return
    # Every bar has the same width, whatever the number of groups in its panel.
    drawn = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=groups)[0]
    for axes, (size, rows) in zip(drawn, panels.items(), strict=True):
        _draw_panel(axes, rows, engines)
        axes.set_title(f"{size} {'request' if size == 1 else 'requests'}", fontsize=10)
    drawn[0].set_ylabel("growth of a step over the same\nengine without LoRA, %")
    legend_below(figure, drawn, 3, 9)


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
            colors=_FLOOR_COLOUR,
            linewidth=1.5,
            label="floor: the adapters' bytes at copy bandwidth",
        )
    axes.axhline(0, color="#374151", linewidth=0.8)
    axes.set_xlabel("adapters in a step")
