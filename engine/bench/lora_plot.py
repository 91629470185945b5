"""The plot of ``kiln bench lora``: how much longer a step is, by the number of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.plots import KILN_COLOUR, OTHER_COLOUR
from kiln.engine.bench.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (KILN_COLOUR, OTHER_COLOUR)
_FLOOR_COLOUR = "#1f2937"
_GROUP = 0.8  # the width of all bars of one number of adapters


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
    _draw_legend(figure, drawn, engines)


def _draw_legend(figure: Figure, panels: Sequence[Any], engines: Sequence[str]) -> None:
    """Draw one legend for all panels, the engines first."""
    handles: dict[str, Any] = {}
    for axes in panels:
        found, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, found, strict=True))
    labels = sorted(handles, key=lambda label: label not in engines)
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
    )


def _draw_panel(axes: Any, rows: Sequence[Row], engines: Sequence[str]) -> None:
    numbers = sorted({row["adapters"] for row in rows})
    width = _GROUP / len(engines)
    for index, engine in enumerate(engines):
        own = [row for row in rows if row["engine"] == engine]
        left = [numbers.index(row["adapters"]) - _GROUP / 2 + width * (index + 0.5) for row in own]
        grown = [100 * row["growth"] for row in own]
        bars = axes.bar(left, grown, 0.92 * width, color=_COLOURS[index], label=engine)
        axes.bar_label(bars, fmt="{:+.1f}", padding=2, fontsize=8)
        floors = [
            (place, 100 * row["growth_floor"])
            for place, row in zip(left, own, strict=True)
            if row["growth_floor"]
        ]
        if floors:
            axes.hlines(
                [floor for _, floor in floors],
                [place - width / 2 for place, _ in floors],
                [place + width / 2 for place, _ in floors],
                colors=_FLOOR_COLOUR,
                linewidth=1.5,
                label="floor: the adapters' bytes at copy bandwidth",
            )
    axes.axhline(0, color="#374151", linewidth=0.8)
    axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axes.set_xlabel("adapters in a step")
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
