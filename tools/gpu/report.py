"""What gpu_check shows and writes: the machine, tables, plots."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path
from typing import Any

import torch

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
            print("  failed:", row)


def write_tables(result: dict[str, Any], folder: Path) -> None:
    """Write gpu_check.md, and a roofline plot a kernel where matplotlib is installed."""
    machine_line = (
        f"{result['machine']['gpu']}, Python {result['machine']['python']}, "
        + ", ".join(f"{name} {version}" for name, version in result["machine"]["packages"].items())
    )
    parts = ["# GPU check", "", machine_line, "", f"`{result['command']}`", ""]
    for name, section in result["sections"].items():
        parts += [f"## {name}: {section['status']}", "", section.get("reason", "")]
        parts += _table(section["rows"])
    (folder / "gpu_check.md").write_text("\n".join(parts) + "\n")
    timing = result["sections"].get("kernel_timing", {}).get("rows", [])
    if timing:
        _plot(timing, folder / "gpu_kernels.png")


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


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    """One panel a kernel: achieved bandwidth over bytes moved, with the copy's as the roof."""
    try:
        from matplotlib import pyplot
    except ImportError:
        print("no matplotlib: no plot")
        return
    names = list(dict.fromkeys(row["kernel"] for row in rows))
    figure, axes = pyplot.subplots(2, -(-len(names) // 2), figsize=(14, 7), squeeze=False)
    for name, axis in zip(names, axes.flat, strict=False):
        mine = [row for row in rows if row["kernel"] == name]
        for kind in ("jit", "triton", "compile", "torch"):
            if f"{kind}_us" not in mine[0]:
                continue
            x = [row["bytes"] / 1e6 for row in mine]
            y = [row["bytes"] / row[f"{kind}_us"] / 1e3 for row in mine]
            axis.plot(x, y, marker="o", label=kind)
        axis.axhline(mine[0]["copy_gb_s"], color="grey", linestyle="--", label="copy")
        axis.set(xscale="log", yscale="log", title=name, xlabel="MB moved", ylabel="GB/s")
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
