"""The table and the plot of a cold build."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill
from typing import Any

from machine import describe


def write_table(result: dict[str, Any], path: Path) -> None:
    """Write a Markdown table, with what it was measured on above it."""
    lines = [
        "# Cold build of one program",
        "",
        f"{describe(result['machine'])}; {result['machine']['nvcc']}. Load at the end: "
        f"{result['load_average_at_end']}.",
        "",
        f"`{result['command']}`",
        "",
        f"Mean over {', '.join(result['kernels'])} for every type ({result['arch']}), medians of "
        f"up to {result['rounds']} rounds.",
        "",
        "| way | wall s | CPU s | times NVRTC, wall | times NVRTC, CPU | an empty kernel, CPU s |"
        " artefact bytes | rounds |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["ways"]:
        lines.append(
            f"| {row['what']} | {row['wall_seconds']:.3f} | {row['cpu_seconds']:.3f} | "
            f"{row['times_nvrtc_wall']} | {row['times_nvrtc_cpu']} | "
            f"{row['empty_kernel_cpu_seconds'] or ''} | {row['artefact_bytes']} | "
            f"{len(row['rounds'])} |"
        )
    lines += _program_table(result["programs"])
    lines += [
        "",
        *(f"Not measured: {name}: {why}." for name, why in result["not_measured"].items()),
    ]
    path.write_text("\n".join(lines).rstrip() + "\n")


def _program_table(programs: list[dict[str, Any]]) -> list[str]:
    if not programs:
        return []
    return [
        "",
        "By program, CPU s:",
        "",
        "| program | NVRTC | nvcc -cubin | times |",
        "| --- | ---: | ---: | ---: |",
        *(
            f"| {row['program']} | {row['nvrtc_cpu_seconds']:.3f} | "
            f"{row['nvcc_cubin_cpu_seconds']:.3f} | {row['times_nvrtc_cpu']} |"
            for row in programs
        ),
    ]


def write_plot(result: dict[str, Any], path: Path) -> None:
    """Draw CPU and wall seconds of each way, on a logarithmic axis."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no matplotlib: no plot")
        return
    ways = result["ways"][::-1]
    figure, axis = pyplot.subplots(figsize=(9, 0.7 * len(ways) + 1.4))
    for offset, name, label in ((0.2, "wall_seconds", "wall"), (-0.2, "cpu_seconds", "CPU")):
        places = [index + offset for index in range(len(ways))]
        bars = axis.barh(places, [way[name] for way in ways], height=0.36, label=label)
        axis.bar_label(bars, fmt="%.3g s", padding=3)
    axis.set_yticks(range(len(ways)), [fill(way["what"], 40) for way in ways])
    axis.set(xscale="log", xlabel="seconds for one program, cold")
    axis.set_xlim(right=axis.get_xlim()[1] * 4)
    axis.grid(axis="x", alpha=0.3)
    axis.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
