"""A kernel benchmark as files: JSON, a table, and one roofline a family."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from kiln.engine.cli.bench_roofline import draw_roofline
from kiln.jit_kernels.bench.table import remarks, side_by_side


def write_files(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write kernels.json, kernels.md and roofline-FAMILY.png into a folder; return their paths.

    A smoke test on a CPU puts -cpu-smoke-test into every name. No pictures without matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mark = "-cpu-smoke-test" if report["device"] == "cpu" else ""
    paths = [folder / f"kernels{mark}.json", folder / f"kernels{mark}.md"]
    paths[0].write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    paths[1].write_text(markdown(report) + "\n", encoding="utf-8")
    return paths + draw_rooflines(report, folder, mark)


def draw_rooflines(report: dict[str, Any], folder: Path, mark: str = "") -> list[Path]:
    """Draw roofline-FAMILY.png for each family that has numbers; return the paths."""
    if importlib.util.find_spec("matplotlib") is None:
        return []
    where = report["hardware"]["cpu" if report["device"] == "cpu" else "gpu"]
    where = f"{where}, {report['date'][:10]} {report['remark']}".strip()
    drawn = []
    for family in dict.fromkeys(row["family"] for row in report["rows"]):
        mine = [row for row in report["rows"] if row["family"] == family]
        path = folder / f"roofline-{family}{mark}.png"
        if draw_roofline(mine, report["ceilings"], where, path):
            drawn.append(path)
    return drawn


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a table with the machine, the roofs and the command."""
    roofs, machine = report["ceilings"], report["hardware"]
    packages = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return "\n".join(
        [
            "# Kernels" + (f": {report['remark']}" if report["remark"] else ""),
            "",
            f"GPU: {machine['gpu']}; {machine['cpu']}, {machine['cores']} cores. {packages}. "
            f"{report['date']}: `{report['command']}`",
            "",
            f"Copy {roofs['copy_bytes_s'] / 1e12:.2f} TB/s, matrix product "
            f"{roofs['matmul_flops_s'] / 1e12:,.1f} TFLOP/s, smallest launch "
            f"{roofs['launch_us']:.2f} µs, all measured on this machine just before. µs: median of "
            "rounds in which all implementations take turns; ±: width of the middle half of the "
            "rounds over the median; of floor: the time in which the bytes or the operations could "
            "be done at those rates over the time taken. A ratio above 1: Kiln is faster. On a GPU "
            "from sm_90 on Kiln's own launches may come before the one ahead has ended, in graphs "
            "too; the others' do not.",
            "",
            *markdown_table(report["rows"]),
            "",
            *(f"- {remark}" for remark in remarks(report["rows"])),
        ]
    )


def markdown_table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the side-by-side table's lines."""
    titles, lines = side_by_side(rows)
    table = [titles, ["---"] * 2 + ["---:"] * (len(titles) - 2), *lines]
    return ["| " + " | ".join(cells) + " |" for cells in table]
