#!/usr/bin/env python3
"""Draw every plot of benchmarks/ again from its JSON.

All of them: python tools/draw_benchmarks.py
Those of some records: python tools/draw_benchmarks.py latency-phi4-gpu compile

A plot is drawn if its record has a page. Rooflines are those of gpu_check alone.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

import bench_compile  # noqa: E402 - after the path, as all below
import bench_quantised  # noqa: E402
from cold_build import report as cold_build  # noqa: E402
from gpu import report as gpu_check  # noqa: E402

from kiln.engine.bench import latency, lora, plots, prefill, serving_plot, style  # noqa: E402
from kiln.engine.bench.report import Draw, Plots, Report  # noqa: E402

_ROOFLINES = "gpu_check"
_NAMED: Mapping[str, Draw] = {  # benchmark -> what draws the plot with the record's name
    "latency": latency.draw,
    "lora": lora.draw,
    "offline": plots.draw_throughput,
    "prefill": prefill.draw,
    "serving": serving_plot.draw,
    "serving-prefix": serving_plot.draw,
    "serving-sharegpt": serving_plot.draw,
}
_OWN: Mapping[str, Callable[[Report], Plots]] = {
    "compile": bench_compile.plots,
    "cold_build": cold_build.plots,
}


def plots_of(path: Path) -> Plots:
    """Return the plots of a record, by the names of their files; none if it has no page."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if "benchmark" not in content or not path.with_suffix(".md").exists():
        return {}
    report = Report.from_json(content)
    if report.benchmark in _NAMED:
        draw = partial(_NAMED[report.benchmark], report, report.processor)
        return {f"{path.stem}.png": draw}
    if report.benchmark in _OWN:
        return _OWN[report.benchmark](report)
    if report.benchmark.startswith("quantised-"):
        return bench_quantised.plots(report)
    if not report.benchmark.startswith("gpu_check"):
        return {}
    found = gpu_check.plots(report, path.stem)
    return {
        name: draw
        for name, draw in found.items()
        if not name.startswith("roofline") or path.stem == _ROOFLINES
    }


def all_plots(folder: Path) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Yield the plots of every record in a folder."""
    for path in sorted(folder.glob("*.json")):
        yield from plots_of(path).items()


def main() -> None:
    """Draw the plots, and say which."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="*", metavar="NAME", help="default: all")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    paths = [args.folder / f"{name}.json" for name in args.records]
    for path in paths or sorted(args.folder.glob("*.json")):
        for name, draw in plots_of(path).items():
            style.save(draw, args.folder / name)
            print(name)


if __name__ == "__main__":
    main()
