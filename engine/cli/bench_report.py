"""A benchmark's rows as JSON, as a table, and as a plot: each with the machine and the command."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kiln.engine.cli.bench_machine import hardware, versions

_COLUMNS = (
    ("output tokens/s", "output_tokens_per_s", "{:,.0f}"),
    ("requests/s", "requests_per_s", "{:.2f}"),
    ("TTFT ms, median", "ttft_ms_median", "{:.1f}"),
    ("TTFT ms, p99", "ttft_ms_p99", "{:.1f}"),
    ("between tokens ms, median", "inter_token_ms_median", "{:.2f}"),
    ("between tokens ms, p99", "inter_token_ms_p99", "{:.2f}"),
)

Report = dict[str, Any]


def make(model: str, rows: list[dict[str, Any]], load: dict[str, Any]) -> Report:
    """Return the report of one run. The first row is Kiln's; ratios are of its tokens a second."""
    first = rows[0]["output_tokens_per_s"]
    for row in rows[1:]:
        row["kiln_is_faster_by"] = first / row["output_tokens_per_s"]
    return {
        "benchmark": "serving",
        "model": model,
        "load": load,
        "rows": rows,
        "hardware": hardware(),
        "versions": versions("torch", "transformers"),
        "command": shlex.join(["kiln", *sys.argv[1:]]),
        "date": datetime.now(UTC).date().isoformat(),
    }


def markdown(report: Report) -> str:
    """Return the report as a table with a line on how it came about."""
    load, machine, packages = report["load"], report["hardware"], report["versions"]
    lines = [
        f"### Serving {report['model']}",
        "",
        f"{load['num_prompts']} prompts of up to {load['prompt_tokens']} random tokens, "
        f"{load['output_tokens']} output tokens each, greedy, {load['concurrency']} at a time.",
        "",
        "| | "
        + " | ".join(title for title, _, _ in _COLUMNS)
        + " | threads | first row is faster by |",
        "|---" * (len(_COLUMNS) + 3) + "|",
    ]
    for row in report["rows"]:
        cells = [form.format(row[key]) if key in row else "–" for _, key, form in _COLUMNS]
        ratio = row.get("kiln_is_faster_by")
        cells.append(str(row.get("threads", "")))
        cells.append("" if ratio is None else f"{ratio:.1f}×")
        lines.append(f"| {row['name']} | " + " | ".join(cells) + " |")
    shown = ", ".join(f"{name} {version}" for name, version in packages.items())
    lines += [
        "",
        f"{machine['cpu']}, {machine['cores']} cores; GPU: {machine['gpu']}. {shown}. "
        f"{report['date']}, one run: `{report['command']}`",
    ]
    return "\n".join(lines)


def write(report: Report, folder: Path) -> list[Path]:
    """Write the files, named for the model and the device, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    place = "cpu" if report["hardware"]["gpu"] == "none" else "gpu"
    stem = re.sub(r"[^\w.-]+", "-", f"serving-{report['model']}-{place}")
    files = {
        folder / f"{stem}.json": json.dumps(report, indent=2) + "\n",
        folder / f"{stem}.md": markdown(report) + "\n",
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    plot = folder / f"{stem}.png"
    return [*files, plot] if _plot(report, plot) else list(files)


def _plot(report: Report, path: Path) -> bool:
    """Draw output tokens a second; False where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    rows = report["rows"][::-1]
    figure = Figure(figsize=(8, 1.2 + 0.6 * len(rows)), layout="constrained")
    axes = figure.subplots()
    colours = ["#a99e91"] * (len(rows) - 1) + ["#c2410c"]
    bars = axes.barh(
        [row["name"] for row in rows], [row["output_tokens_per_s"] for row in rows], color=colours
    )
    axes.bar_label(bars, fmt="{:,.0f}", padding=4)
    axes.set_xlabel("output tokens per second")
    axes.set_title(f"{report['model']} on {report['hardware']['cpu']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)
    return True
