"""A roofline plot of a family's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.report import Row
from kiln.engine.bench.style import KILN_COLOUR, ROOF_COLOUR, legend_below, titled
from kiln.jit_kernels.bench.table import names_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = (
    KILN_COLOUR, "#6b7280", "#2563eb", "#059669", "#9333ea", "#b45309", "#0891b2", "#be185d",
)  # fmt: skip
_MARKERS = "os^DvP*X"
_CHARACTER, _HALF, _GAP = 7, 9, 8  # pixels of a label: its width by character, half its height
_STEP = 1.22  # horizontal factor between implementations of one intensity, to avoid overlap


def draw_roofline(
    rows: Sequence[Row], ceilings: Mapping[str, float], where: str, figure: Figure
) -> None:
    """Draw the measured rows of one family.

    One panel per kernel: operations per byte on x, operations per second on y, copy bandwidth and
    matrix product rate as roofs, a point per implementation and size. Points of one size are side
    by side: Kiln's at the true x, the others shifted to its right. ``where`` names the machine.
    """
    kernels = list(dict.fromkeys(row["kernel"] for row in rows))
    columns = min(3, len(kernels))
    lines = -(-len(kernels) // columns)
    figure.set_size_inches(1.2 + 4.3 * columns, 1.6 + 4.4 * lines)
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    names = names_in(rows)
    for kernel, panel in zip(kernels, panels, strict=False):
        own = _draw_panel(panel, kernel, [row for row in rows if row["kernel"] == kernel], names)
        points = [point for line in panel.lines for point in line.get_xydata()]
        _draw_roofs(panel, ceilings)
        _label(panel, own, points)
    for panel in panels[len(kernels) :]:
        panel.set_visible(False)
    legend_below(figure, figure.axes, 3 * columns)
    titled(
        figure,
        f"{rows[0]['family']} on {where}",
        "points of one size are side by side, the first in its place",
    )


def _draw_panel(
    panel: Any, kernel: str, rows: Sequence[Row], names: Sequence[str]
) -> list[tuple[float, float, int]]:
    """Draw the points; return those of the first implementation: y, x, bytes."""
    own: list[tuple[float, float, int]] = []
    computes = rows[0]["flops"] > 0
    for place, name in enumerate(names):
        mine = [row for row in rows if row["implementation"] == name]
        if not mine:
            continue
        # A kernel that only moves bytes is drawn at one operation per byte.
        work = [row["flops"] if computes else row["bytes"] for row in mine]
        x = [ops / row["bytes"] * _STEP**place for ops, row in zip(work, mine, strict=True)]
        y = [ops / row["median_us"] / 1e6 for ops, row in zip(work, mine, strict=True)]
        style = {"color": _COLOURS[place % 8], "marker": _MARKERS[place % 8]}
        panel.plot(x, y, label=name, markersize=5, linestyle="", alpha=0.85, **style)
        if place == 0:
            own = list(zip(y, x, (row["bytes"] for row in mine), strict=True))
    panel.set_title(kernel if computes else f"{kernel} (moves bytes only)")
    panel.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s")
    return own


def _label(
    panel: Any, own: Sequence[tuple[float, float, int]], points: Sequence[tuple[float, float]]
) -> None:
    """Write the bytes left of the points (y, x, bytes), where no other label or point is."""
    place = panel.transData.transform
    taken = [(x, x, y, y) for x, y in map(place, points)]
    for up, left, num_bytes in sorted(own):
        (x, y), text = place((left, up)), _short(num_bytes)
        box = (x - _GAP - _CHARACTER * len(text), x - _GAP, y - _HALF, y + _HALF)
        if any(_overlap(box, other) for other in taken):
            continue
        panel.annotate(
            text, (left, up), xytext=(-7, -2), textcoords="offset points", ha="right", va="center",
            fontsize=7, bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0.5},
        )  # fmt: skip
        taken.append(box)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1] and one[2] <= other[3] and other[2] <= one[3]


def _draw_roofs(panel: Any, ceilings: Mapping[str, float]) -> None:
    """Draw both roofs over the range of a panel's points, including their ridge point."""
    copy, matmul = ceilings["copy_bytes_s"] / 1e12, ceilings["matmul_flops_s"] / 1e12
    points = [point for line in panel.lines for point in line.get_xydata()]
    ridge = matmul / copy
    left = min(*(x for x, _ in points), ridge) / 12
    right = max(*(x for x, _ in points), ridge) * 2.5
    low = min(*(y for _, y in points), left * copy) / 2
    panel.plot(
        [left, ridge], [left * copy, matmul], color=ROOF_COLOUR, linestyle="--", linewidth=1,
        label=f"copy {copy:.2f} TB/s",
    )  # fmt: skip
    panel.plot(
        [ridge, right], [matmul, matmul], color=ROOF_COLOUR, linestyle=":", linewidth=1.2,
        label=f"matrix product {matmul:,.0f} TFLOP/s",
    )  # fmt: skip
    panel.set(xlim=(left, right), ylim=(low, matmul * 2))


def _short(num_bytes: int) -> str:
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"
