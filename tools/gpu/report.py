"""What gpu_check shows and writes: the machine, tables, plots."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from kiln.engine.cli.bench_kernel_files import draw_rooflines, markdown

_PACKAGES = (
    "torch",
    "triton",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "cupy-cuda13x",
    "transformers",
)


def machine() -> dict[str, Any]:
    """Return hardware and versions, for the head of every result."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "python": platform.python_version(), "packages": versions}


def show(name: str, section: dict[str, Any]) -> None:
    """Print the status of a section, and what failed in it."""
    print(f"{name}: {section['status']} ({section['seconds']} s)", section.get("reason", ""))
    for row in section["rows"]:
        if row.get("ok") is False:
            print("  failed:", {key: value for key, value in row.items() if value not in ({}, "")})


def write_tables(result: dict[str, Any], folder: Path) -> None:
    """Write gpu_check.md, and a roofline a kernel family where matplotlib is installed."""
    machine_line = (
        f"{result['machine']['gpu']}, Python {result['machine']['python']}, "
        + ", ".join(f"{name} {version}" for name, version in result["machine"]["packages"].items())
    )
    parts = ["# GPU check", "", machine_line, "", f"`{result['command']}`", ""]
    for name, section in result["sections"].items():
        parts += [f"## {name}: {section['status']}", "", section.get("reason", ""), ""]
        rows = section["rows"]
        parts += _timing_lines(rows, result, folder) if name == "kernel_timing" else _table(rows)
    (folder / "gpu_check.md").write_text("\n".join(parts) + "\n")


def _timing_lines(rows: list[dict[str, Any]], result: dict[str, Any], folder: Path) -> list[str]:
    """Return the timings as ``kiln bench kernels`` shows them, and draw its rooflines."""
    ceilings = next((row["ceilings"] for row in rows if "ceilings" in row), None)
    if ceilings is None:
        return _table(rows)
    measured = [row for row in rows if "implementation" in row]
    bench = {
        "device": "cuda",
        "remark": "",
        "ceilings": ceilings,
        "rows": measured,
        "hardware": result["machine"] | {"cpu": platform.processor(), "cores": os.cpu_count()},
        "versions": result["machine"]["packages"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": result["command"],
    }
    for path in draw_rooflines(bench, folder):
        print(f"wrote {path}")
    rest = [row for row in rows if "implementation" not in row and "ceilings" not in row]
    return [*markdown(bench).splitlines()[4:], "", *_table(rest)]


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(name, "")) for name in names) + " |")
    return [*lines, ""]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item}" for key, item in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
