"""What is wrong with a plot's texts: outside of the figure, over each other, or over a line."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

_SLACK = 1.0  # pixels
_STEPS = 50  # points of a line's piece that are looked at


def faults(figure: Figure) -> list[str]:
    """Name every text that is cut or overlaps another one, and every legend over a line."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    width, height = canvas.get_width_height()
    boxes = [(_shown(text), text.get_window_extent(renderer)) for text in _texts(figure)]
    found = [
        f"{name!r} is cut"
        for name, box in boxes
        if box.x0 < -_SLACK or box.y0 < -_SLACK
        or box.x1 > width + _SLACK or box.y1 > height + _SLACK
    ]  # fmt: skip
    found += [
        f"{first!r} and {second!r} overlap"
        for (first, one), (second, other) in combinations(boxes, 2)
        if _overlap(one, other)
    ]
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is not None and _hides(legend.get_window_extent(renderer), axes):
            found.append(f"the legend of {axes.get_title()!r} hides a line")
    return found


def _texts(figure: Figure) -> list[Text]:
    """Every text that is drawn; of the ticks only those inside of their axis."""
    ticks = {
        label: axis.axes.get_visible() and _is_inside(axis, tick)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
    }
    hidden = {text for axes in figure.axes if not axes.get_visible() for text in axes.findobj(Text)}
    return [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and ticks.get(text, True)
        and text not in hidden
    ]  # fmt: skip


def _is_inside(axis: Any, tick: Any) -> bool:
    low, high = sorted(axis.get_view_interval())
    return bool(low <= tick.get_loc() <= high)


def _overlap(one: Any, other: Any) -> bool:
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(wide > _SLACK and high > _SLACK)


def _hides(box: Any, axes: Any) -> bool:
    for line in axes.lines:
        points = axes.transData.transform(line.get_xydata())
        for (x0, y0), (x1, y1) in pairwise(points):
            for step in range(_STEPS + 1):
                part = step / _STEPS
                if box.contains(x0 + part * (x1 - x0), y0 + part * (y1 - y0)):
                    return True
    return False


def _shown(text: Text) -> str:
    return text.get_text()[:60]
