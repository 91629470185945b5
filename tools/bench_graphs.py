#!/usr/bin/env python3
"""Measure what CUDA graphs give to short prefills, and what they cost at the start.

    python3 tools/bench_graphs.py [--models qwen3-0.6b llama3-8b] [--output benchmarks]

Each row is a new process with random weights: a model under one KILN_GRAPH_PREFILL. It measures the
start, the capture, the graphs' memory beside what was reserved for it, and the time of a step that
computes a prompt of some tokens and samples one. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root")]

from kiln.engine.bench.report import Report, command_line, table  # noqa: E402 - after the path
from kiln.engine.bench.shapes import SHAPES, write_shape  # noqa: E402

MODES = ("off", "piecewise", "full")
TOKENS = (16, 32, 64, 128, 256, 512, 1024, 2048)
REPEATS = 21
_MIB = 2**20


def main() -> None:
    """Measure every model in every mode; write JSON and a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--child", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_measure(*args.child)))
        return
    rows = []
    for model in args.models:
        for mode in args.modes:
            print(f"{model}, KILN_GRAPH_PREFILL={mode}", file=sys.stderr, flush=True)
            rows.append(_in_child(model, mode))
    for row in rows:
        same = [one for one in rows if one["model"] == row["model"] and one["mode"] == "off"]
        row["speedup"] = {n: same[0]["ms"][n] / row["ms"][n] for n in row["ms"]} if same else None
    report = Report("graphs", command_line("tools/bench_graphs.py"), rows)
    text = _page(report)
    print(text)
    report.write(args.output, "graphs", text)


def _in_child(model: str, mode: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", model, mode]
    env = {**os.environ, "KILN_GRAPH_PREFILL": mode}
    row = json.loads(subprocess.check_output(command, env=env, text=True).splitlines()[-1])
    return row | {"ms": {int(tokens): ms for tokens, ms in row["ms"].items()}}


def _measure(model: str, mode: str) -> dict[str, Any]:
    begun = time.perf_counter()
    from kiln.engine.llm import LLM
    from kiln.engine.requests.sampling_params import SamplingParams

    imported = time.perf_counter()
    with tempfile.TemporaryDirectory() as parent:
        folder = write_shape(model, Path(parent))
        llm = LLM(
            str(folder), load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            max_num_batched_tokens=2048,
        )  # fmt: skip
    loaded = time.perf_counter()
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    random.seed(0)
    prompts = {n: [random.randrange(1000) for _ in range(n)] for n in TOKENS}

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        llm.generate([prompts[tokens]], one)
        return time.perf_counter() - start

    times: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    for _ in range(REPEATS):
        for tokens in TOKENS:
            times[tokens].append(seconds(tokens))
    stats, memory = llm.core.stats(), llm.core.runner.memory
    return {
        "model": model,
        "mode": mode,
        "import_seconds": imported - begun,
        "load_seconds": loaded - imported,
        "graphs": stats.graphs,
        "capture_seconds": stats.graph_capture_seconds,
        "graph_mib": stats.graph_bytes / _MIB,
        "reserved_mib": memory.graphs / _MIB,
        "step_mib": memory.step / _MIB,
        "replays": dict(stats.graph_replays),
        "fallbacks": dict(stats.graph_fallbacks),
        "ms": {n: 1000 * statistics.median(of[1:]) for n, of in times.items()},
    }


def _page(report: Report) -> str:
    start = {
        "model": "{model}", "KILN_GRAPH_PREFILL": "{mode}", "imports, s": "{import_seconds:.1f}",
        "load to ready, s": "{load_seconds:.1f}", "graphs": "{graphs}",
        "capture, s": "{capture_seconds:.2f}", "graphs, MiB": "{graph_mib:.0f}",
        "reserved, MiB": "{reserved_mib:.0f}",
    }  # fmt: skip
    by_tokens = {"model": "{model}", "KILN_GRAPH_PREFILL": "{mode}"}
    times = by_tokens | {f"{n}": f"{{ms[{n}]:.2f}}" for n in TOKENS}
    ratios = by_tokens | {f"{n}": f"{{speedup[{n}]:.2f}}×" for n in TOKENS}
    return report.markdown(
        "CUDA graphs of short prefills, and their cost",
        "The start, in a new process with random weights and a filled kernel cache.",
        table(start, report.rows),
        f"Milliseconds from a prompt of some tokens to its first token, median of {REPEATS - 1}.",
        table(times, report.rows),
        "How much faster than the same step launched kernel by kernel.",
        table(ratios, report.rows),
    )


if __name__ == "__main__":
    main()
