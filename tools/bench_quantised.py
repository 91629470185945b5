#!/usr/bin/env python3
"""Decode steps and prefill of Llama-3-8B's shape in several weight formats, beside vLLM.

python tools/bench_quantised.py [--forms bf16 awq] [--vllm PYTHON]. Weights are random. Each form
is measured in Kiln, then in vLLM, with each engine's defaults and room for 256 requests. Needs a
GPU; --model demo --forms bf16 tries the program on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root")]

from kiln.engine.bench import latency, prefill  # noqa: E402 - after the path, as all below
from kiln.engine.bench.choice import kiln_and  # noqa: E402
from kiln.engine.bench.engine import BenchEngine  # noqa: E402
from kiln.engine.bench.machine import versions  # noqa: E402
from kiln.engine.bench.plots import draw_groups  # noqa: E402
from kiln.engine.bench.report import Plots, Report, Row, command_line, table  # noqa: E402
from kiln.engine.bench.shapes import write_shape  # noqa: E402
from kiln.engine.bench.side_by_side import Subject  # noqa: E402
from kiln.engine.bench.style import KILN_COLOUR, OTHER_COLOUR, legend_below, titled  # noqa: E402
from kiln.engine.config import EngineConfig, ModelConfig, SchedulerConfig  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = "llama3-8b"
# By form: the suffix of the shape, and what --quantization says.
FORMS = {
    "bf16": ("", None),
    "fp8 (channel)": ("-fp8", None),
    "fp8 (block)": ("-fp8-block", None),
    "awq": ("-awq", None),
    "--quantization fp8": ("", "fp8"),
}
_ROWS, _PROMPT, _TOKENS = (1, 16, 64, 256), 128, 128
_PREFILL = ((32, 2048),)
_EXPLAINED = (
    "Milliseconds of a decode step by the number of requests in it, each of "
    f"{_PROMPT} random tokens, greedy: the difference between runs of "
    f"{latency.SHORT_RUN + _TOKENS} and {latency.SHORT_RUN} new tokens, over {_TOKENS}. Prompts: "
    f"{_PREFILL[0][0]} of {_PREFILL[0][1]:,} tokens that arrive at once. Floor: the bytes of "
    "weights, keys and values that a step must read, at the rate that copies reach on this GPU. "
    "Start: the seconds until the engine takes requests, in this process or its own."
)
_COLUMNS = {
    "weights": "{form}",
    "engine": "{engine}",
    **{f"ms at {rows}": f"{{ms_{rows}:.2f}}" for rows in _ROWS},
    "prompt tokens/s": "{tokens_s:,.0f}",
    "start, s": "{load_seconds:.0f}",
    **{f"floor at {rows}": f"{{floor_{rows}:.2f}}" for rows in (1, 256)},
}


def main() -> None:
    """Measure; write JSON, a table and a plot after each form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["demo", SHAPE], default=SHAPE)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument(
        "--join", nargs="+", type=Path, metavar="JSON", help="write reports of several runs as one"
    )
    args = parser.parse_args()
    if args.join:
        write(joined(args.join), args.output)
        return
    rows: list[Row] = []
    packages: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as parent:
        for form in args.forms:
            rows += measure_form(args, form, Path(parent), packages)
            report = Report(
                f"quantised-{args.model}",
                command_line("tools/bench_quantised.py"),
                rows,
                {"rows": _ROWS, "prefill": _PREFILL},
                versions=versions() | packages,
            )
            print(write(report, args.output), flush=True)


def joined(paths: Sequence[Path]) -> Report:
    """Return the rows of several runs on one machine as one report."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rows = [row for run in runs for row in run["rows"]]
    order = list(FORMS)
    return Report(
        runs[0]["benchmark"],
        "; then ".join(run["command"] for run in runs),
        sorted(rows, key=lambda row: (order.index(row["form"]), row["engine"])),
        runs[0]["load"],
        hardware=runs[0]["hardware"],
        versions={name: text for run in runs for name, text in run["versions"].items()},
        date=runs[-1]["date"],
    )


def write(report: Report, folder: Path) -> str:
    """Write JSON, page and plot; return the table."""
    shown = table(_COLUMNS, report.rows)
    title = report.benchmark.replace("quantised-", "Weight formats, ")
    page = report.markdown(title, _EXPLAINED, shown)
    report.write(folder, report.benchmark, page, plots(report))
    return shown


def plots(report: Report) -> Plots:
    """Return the plot by the name of its file."""
    return {f"{report.benchmark}.png": partial(draw, report)}


def draw(report: Report, figure: Figure) -> None:
    """Draw the time of a step with one row and with many, and the prompt tokens per second."""
    rows = [row | {"label": row["engine"]} for row in report.rows]
    colours = {"kiln": KILN_COLOUR, "vllm": OTHER_COLOUR}
    figure.set_size_inches(15, 4.6)
    panels = [("ms_1", "ms a step, 1 row"), ("ms_64", "ms a step, 64 rows")]
    panels.append(("tokens_s", "prompt tokens per second"))
    for axes, (value, title) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        form = "{:,.0f}" if value == "tokens_s" else "{:.2f}"
        own = [row for row in rows if row.get(value) is not None]
        draw_groups(
            axes, own, "form", value, lambda row, v=value, f=form: f.format(row[v]), colours
        )
        axes.set_title(title)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.tick_params(axis="x", labelsize=8, rotation=12)
    shape = report.benchmark.replace("quantised-", "")
    titled(figure, f"Weight formats of {shape} on {report.hardware['gpu']}")
    legend_below(figure, figure.axes, 2)


def measure_form(
    args: argparse.Namespace, form: str, parent: Path, packages: dict[str, str]
) -> Iterator[Row]:
    """Yield a row for each engine; ``packages`` gets the versions of the baseline's."""
    suffix, quantization = FORMS[form]
    tiny = args.model == "demo"
    folder = ROOT / "engine" / "demo" if tiny else write_shape(SHAPE + suffix, parent)
    config = EngineConfig(
        ModelConfig(
            str(folder),
            load_format="dummy",
            max_model_len=256 if tiny else 4096,
            quantization=quantization,
        ),
        scheduler=SchedulerConfig(max_num_seqs=4 if tiny else max(_ROWS)),
    )
    subject = Subject(form, config)
    subject.measure_machine(print)
    if tiny:
        load, work = latency.LatencyLoad((1, 4), 16, 16), ((2, 100),)
    else:
        load, work = latency.LatencyLoad(_ROWS, _PROMPT, _TOKENS), _PREFILL
    floors = {f"floor_{rows}": subject.floor_ms(rows, load.context) for rows in load.batch_sizes}
    baseline = "none" if args.vllm is None else "vllm"
    for name, make in kiln_and(baseline, args.vllm or "", config, print).items():
        try:
            with closing(make()) as engine:
                row = _measure(engine, load, work, subject.model.vocab_size)
                packages |= engine.versions
        except Exception as error:  # a baseline may lack a form, and raise anything
            if name == "kiln":
                raise
            print(f"{form}: {name} failed: {error}")
            continue
        yield {"form": form, **row, **floors}


def _measure(engine: BenchEngine, load: latency.LatencyLoad, work: Any, vocab_size: int) -> Row:
    steps = [*latency.measure(engine, load, vocab_size, print)]
    prompts = [*prefill.measure(engine, work, vocab_size, print)]
    return {
        "engine": engine.name,
        "load_seconds": engine.load_seconds,
        **{f"ms_{row['batch_size']}": row["step_ms"] for row in steps},
        **{f"device_ms_{row['batch_size']}": row.get("device_ms") for row in steps},
        "tokens_s": prompts[0]["tokens_per_s"],
        "token_budget": engine.token_budget,
    }


if __name__ == "__main__":
    main()
