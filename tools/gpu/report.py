"""The output of gpu_check: a table per section, rooflines, and plots of the times of sums."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu import sum_plots
from kiln.engine.bench import kernels
from kiln.engine.bench.report import Plots, Report, Row, grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show(name: str, section: dict[str, Any]) -> None:
    """Print the status and the failures of a section."""
    held = f", at most {section['peak_gib']} GiB a process" if "peak_gib" in section else ""
    print(f"{name}: {section['status']} ({section['seconds']} s{held})", section.get("reason", ""))
    for row in section["rows"]:
        if row.get("ok") is False:
            print("  failed:", {key: value for key, value in row.items() if value not in ({}, "")})


def write(report: Report, folder: Path) -> list[Path]:
    """Write JSON, Markdown and plots; return the paths."""
    name = report.benchmark
    return report.write(folder, name, _page(report), plots(report, name))


def plots(report: Report, name: str) -> Plots:
    """Return the plots of a report, by the names of their files. ``name``: that of the report's."""
    found: dict[str, Callable[[Figure], None]] = {}
    where = f"{report.hardware['gpu']}, {report.date[:10]}"
    for section, content in report.details["sections"].items():
        rows: list[Row] = content["rows"]
        ceilings = _ceilings(rows)
        if ceilings is not None:
            found |= kernels.rooflines(_timed(rows), ceilings, where)
        sums = [row for row in rows if "bytes" in row]  # the others had no time, or failed
        if section in sum_plots.SECTIONS and sums:
            title = f"{sum_plots.SECTIONS[section]}; {where}"
            found[f"{name}_sums.png"] = partial(sum_plots.draw_times, sums, title)
    return found


def _page(report: Report) -> str:
    blocks: list[str] = []
    for name, section in report.details["sections"].items():
        blocks += [f"## {name}: {section['status']}", section.get("reason", "")]
        rows: list[Row] = section["rows"]
        ceilings = _ceilings(rows)
        if ceilings is not None:  # the timings, shown as ``kiln bench kernels`` shows them
            blocks += kernels.blocks(_timed(rows), ceilings)
            rows = [row for row in rows if "implementation" not in row and "ceilings" not in row]
        times = [json.loads(row["times"]) for row in rows if "times" in row]  # of a tuned plan
        blocks.append(_table([row for row in rows if "times" not in row]))
        blocks.append(_table(_by_size(times)))
    return report.markdown("GPU check", *blocks)


def _ceilings(rows: list[Row]) -> dict[str, float] | None:
    return next((row["ceilings"] for row in rows if "ceilings" in row), None)


def _timed(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "implementation" in row]


def _by_size(times: list[Row]) -> list[Row]:
    """Return a row for each number of blocks and size, with the microseconds of each way to sum."""
    found: dict[tuple[int, int], Row] = {}
    for one in times:
        key = one["blocks"], one["bytes"]
        row = found.setdefault(key, {"blocks": one["blocks"], "bytes": one["bytes"]})
        row[f"{one['algorithm']}, µs"] = one["us"]
    return list(found.values())


def _table(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return grid(names, [[_cell(row.get(name, "")) for name in names] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
