"""The style of every plot, and what keeps its texts inside the figure and apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KILN_COLOUR = "#c2410c"
OTHER_COLOUR = "#b8ada1"  # lighter than Kiln's in grey, too
ROOF_COLOUR = "#374151"
_RULES: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "figure.titlesize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "figure.dpi": 110,
    "savefig.dpi": 110,
}
_CHARACTER = 0.075  # inches of a title's character, on average
_LABEL_ROOM = (0.5, 0.16)  # inches around a number in which no other number is drawn


@dataclass(frozen=True, slots=True)
class Line:
    """How the line of an engine looks: without colours, too, by its dashes and markers."""

    colour: str
    dashes: str
    marker: str

    def look(self) -> dict[str, Any]:
        """Return the arguments of ``plot``."""
        return {"color": self.colour, "linestyle": self.dashes, "marker": self.marker}


LINES = (
    Line(KILN_COLOUR, "-", "o"),
    Line("#1d4ed8", "--", "s"),
    Line("#047857", "-.", "^"),
    Line("#6b7280", ":", "D"),
)


def make(draw: Callable[[Figure], None]) -> Figure:
    """Return a figure in the style."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_RULES):
        figure = Figure(layout="constrained")
        draw(figure)
    return figure


def save(draw: Callable[[Figure], None], path: Path) -> None:
    """Draw a plot and write it as PNG. The same data give the same bytes."""
    from matplotlib import rc_context

    with rc_context(_RULES):
        make(draw).savefig(path, metadata={"Software": None})


def titled(figure: Figure, *lines: str) -> None:
    """Write the title of a figure, whose size is set, with breaks where a line is too long."""
    width = int((figure.get_figwidth() - 0.3) / _CHARACTER)
    figure.suptitle("\n".join(fill(line, width) for line in lines))


def legend_below(figure: Figure, panels: Sequence[Any], columns: int) -> None:
    """Draw one legend for all panels, below them; each label once, in the order of the panels."""
    handles = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles, loc="outside lower center",
        ncols=max(1, min(len(handles), columns)),
    )  # fmt: skip


def log_axis(axis: Any) -> None:
    """Give an axis a logarithmic scale with plain numbers: 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(lambda value, _: plain(value))
    axis.set_minor_formatter(NullFormatter())
    axis.axes.minorticks_off()


def plain(value: float) -> str:
    """Return a number without an exponent."""
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"


def label_points(
    axes: Any, points: Sequence[tuple[float, float, str]], colour: str, up: int, there: list[Any]
) -> None:
    """Write the text of each point (x, y, text) above it, or below if ``up`` is negative.

    A text that would be over one of ``there`` is left out; those that are written are added.
    """
    axes.autoscale_view()  # the limits are known from here on
    wide, high = axes.figure.get_size_inches()
    box = axes.get_position()
    for x, y, text in points:
        left, low = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        at = (left * wide * box.width, low * high * box.height + up / 72)
        if any(
            abs(at[0] - a) < _LABEL_ROOM[0] and abs(at[1] - b) < _LABEL_ROOM[1] for a, b in there
        ):
            continue
        there.append(at)
        axes.annotate(
            text, (x, y), xytext=(0, up), textcoords="offset points", color=colour, ha="center",
            va="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6},
        )  # fmt: skip
