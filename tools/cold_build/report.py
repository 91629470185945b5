"""The report and the plot of bench_cold_build.py."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from kiln.engine.bench.report import Report, table

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
    report.write(folder, "cold_build", text, {"cold_build.png": partial(_draw, report)})


def _draw(report: Report, figure: Figure) -> None:
    """Draw CPU and wall seconds of each way, on a logarithmic axis."""
    ways = report.rows[::-1]
    figure.set_size_inches(9, 0.7 * len(ways) + 1.4)
    axis = figure.subplots()
    for offset, name, label in ((0.2, "wall_seconds", "wall"), (-0.2, "cpu_seconds", "CPU")):
        places = [index + offset for index in range(len(ways))]
        bars = axis.barh(places, [way[name] for way in ways], height=0.36, label=label)
        axis.bar_label(bars, fmt="%.3g s", padding=3)
    axis.set_yticks(range(len(ways)), [fill(way["what"], 40) for way in ways])
    axis.set(xscale="log", xlabel="seconds for one program, cold")
    axis.set_xlim(right=axis.get_xlim()[1] * 4)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="upper right")
