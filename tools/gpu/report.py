"""The output of gpu_check: a table per section, and rooflines of the timings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kiln.engine.bench import kernels
from kiln.engine.bench.report import Plots, Report, Row, grid


def show(name: str, section: dict[str, Any]) -> None:
    """Print the status and the failures of a section."""
    print(f"{name}: {section['status']} ({section['seconds']} s)", section.get("reason", ""))
    for row in section["rows"]:
        if row.get("ok") is False:
            print("  failed:", {key: value for key, value in row.items() if value not in ({}, "")})


def write(report: Report, folder: Path) -> list[Path]:
    """Write JSON, Markdown, and a roofline per kernel family; return the paths."""
    blocks: list[str] = []
    plots: Plots = {}
    for name, section in report.details["sections"].items():
        blocks += [f"## {name}: {section['status']}", section.get("reason", "")]
        rows: list[Row] = section["rows"]
        ceilings = next((row["ceilings"] for row in rows if "ceilings" in row), None)
        if ceilings is not None:  # the timings, shown as ``kiln bench kernels`` shows them
            timed = [row for row in rows if "implementation" in row]
            where = f"{report.hardware['gpu']}, {report.date[:10]}"
            blocks += kernels.blocks(timed, ceilings)
            plots = kernels.rooflines(timed, ceilings, where)
            rows = [row for row in rows if "implementation" not in row and "ceilings" not in row]
        blocks.append(_table(rows))
    return report.write(folder, report.benchmark, report.markdown("GPU check", *blocks), plots)


def _table(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return grid(names, [[_cell(row.get(name, "")) for name in names] for row in rows])


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
