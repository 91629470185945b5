#!/usr/bin/env python3
"""Decode steps and prefill of Llama-3-8B's shape in several weight formats, beside vLLM.

python tools/bench_quantised.py [--forms bf16 awq] [--vllm PYTHON]. Weights are random. Each form
is measured in Kiln, then in vLLM, with each engine's defaults and room for 256 requests. Needs a
GPU; --model demo --forms bf16 tries the program on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root")]

from kiln.engine.bench import latency, prefill  # noqa: E402 - after the path, as all below
from kiln.engine.bench.choice import kiln_and  # noqa: E402
from kiln.engine.bench.engine import BenchEngine  # noqa: E402
from kiln.engine.bench.report import Report, Row, command_line, table  # noqa: E402
from kiln.engine.bench.shapes import write_shape  # noqa: E402
from kiln.engine.bench.side_by_side import Subject  # noqa: E402
from kiln.engine.config import EngineConfig, ModelConfig, SchedulerConfig  # noqa: E402

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
_COLUMNS = {
    "weights": "{form}",
    "engine": "{engine}",
    **{f"ms, {rows} rows": f"{{ms_{rows}:.2f}}" for rows in _ROWS},
    "prompt tokens/s": "{tokens_s:,.0f}",
    "start, s": "{load_seconds:.0f}",
    **{f"floor, {rows} rows": f"{{floor_{rows}:.2f}}" for rows in (1, 256)},
}


def main() -> None:
    """Measure; write JSON and a table after each form."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["demo", SHAPE], default=SHAPE)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    args = parser.parse_args()
    rows: list[Row] = []
    about: dict[str, Any] = {}
    name = f"quantised-{args.model}"
    with tempfile.TemporaryDirectory() as parent:
        for form in args.forms:
            rows += measure_form(args, form, Path(parent), about)
            shown = table(_COLUMNS, rows)
            print(shown, flush=True)
            command = command_line("tools/bench_quantised.py")
            report = Report(name, command, rows, {"rows": _ROWS, "prefill": _PREFILL}, about)
            report.write(args.output, name, report.markdown(f"Weight formats, {args.model}", shown))


def measure_form(
    args: argparse.Namespace, form: str, parent: Path, about: dict[str, Any]
) -> Iterator[Row]:
    """Yield a row for each engine; ``about`` gets the versions, and what Kiln multiplies by."""
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
                about |= {"versions": {**about.get("versions", {}), **engine.versions}}
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
