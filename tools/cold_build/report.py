"""The report and the plot of bench_cold_build.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from kiln.engine.bench.report import Plots, Report, table
from kiln.engine.bench.style import KILN_COLOUR, OTHER_COLOUR, legend_below, log_axis, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WAYS = {
    "way": "{what}",
    "wall s": "{wall_seconds:.3f}",
    "CPU s": "{cpu_seconds:.3f}",
    "times NVRTC, wall": "{times_nvrtc_wall}",
    "times NVRTC, CPU": "{times_nvrtc_cpu}",
    "an empty kernel, CPU s": "{empty_kernel_cpu_seconds}",
    "artefact bytes": "{artefact_bytes}",
    "rounds": "{num_rounds}",
}
_PROGRAMS = {
    "program": "{program}",
    "NVRTC": "{nvrtc_cpu_seconds:.3f}",
    "nvcc -cubin": "{nvcc_cubin_cpu_seconds:.3f}",
    "times": "{times_nvrtc_cpu}",
}


def write(report: Report, folder: Path) -> None:
    """Write cold_build.json, .md and .png."""
    load, found = report.load, report.details
    programs = table(_PROGRAMS, found["programs"])
    text = report.markdown(
        "Cold build of one program",
        f"Mean over {', '.join(load['kernels'])} for every type ({load['arch']}), medians of "
        f"up to {load['rounds']} rounds. Load average at the end: {found['load_average_at_end']}.",
        table(_WAYS, [{**row, "num_rounds": len(row["rounds"])} for row in report.rows]),
        programs and f"By program, CPU s:\n\n{programs}",
        "\n".join(f"Not measured: {way}: {why}." for way, why in found["not_measured"].items()),
    )
    report.write(folder, "cold_build", text, plots(report))


def plots(report: Report) -> Plots:
    """Return the plot by the name of its file."""
    return {"cold_build.png": partial(_draw, report)}


def _draw(report: Report, figure: Figure) -> None:
    """Draw CPU and wall seconds of each way, on a logarithmic axis."""
    ways = report.rows[::-1]
    figure.set_size_inches(9, 0.7 * len(ways) + 1.4)
    axes = figure.subplots()
    log_axis(axes.xaxis)
    shown = {"wall": (0.2, "wall_seconds", KILN_COLOUR), "CPU": (-0.2, "cpu_seconds", OTHER_COLOUR)}
    for label, (offset, name, colour) in shown.items():
        places = [index + offset for index in range(len(ways))]
        seconds = [way[name] for way in ways]
        bars = axes.barh(places, seconds, height=0.36, label=label, color=colour)
        axes.bar_label(bars, fmt="%.3g s", padding=3)
    axes.set_yticks(range(len(ways)), [fill(way["what"], 40) for way in ways])
    axes.set(xlabel="seconds")
    axes.set_xlim(right=axes.get_xlim()[1] * 4)
    axes.grid(visible=False, axis="y")
    titled(figure, f"Cold build of one program, {report.hardware['cpu']}")
    legend_below(figure, [axes], 2)
