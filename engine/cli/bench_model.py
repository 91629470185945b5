"""The flags that several kinds of ``kiln bench`` share: model, limits, baseline, files."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kiln.engine.bench.shapes import SHAPES, write_shape
from kiln.engine.cli.lines import screen_width
from kiln.engine.cli.measuring import add_files, measuring_display, say
from kiln.engine.cli.numbers import count, counts
from kiln.engine.cli.options import (
    add_engine_arguments,
    engine_config,
    find_model,
    located,
    model_of,
    served_name,
)
from kiln.engine.cli.tables import fit_page
from kiln.engine.config import EngineConfig
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.engine import Tell
    from kiln.engine.bench.report import Draw, Report
    from kiln.engine.bench.side_by_side import Measured, Subject
    from kiln.engine.models.model_folder import ModelFiles

_BASELINES = {
    "transformers": "transformers in the same dtype",
    "vllm": "vllm, in a process of its own, with the same dtypes, limits, memory share and seed",
}
# Unless a flag says otherwise, Kiln and vLLM get these limits, so that their reports are
# comparable.
_MAX_NUM_SEQS = 256
_MAX_NUM_BATCHED_TOKENS = 16384
_MAX_MODEL_LEN = 4096


def add_bench_arguments(
    parser: argparse.ArgumentParser,
    baselines: Sequence[str] = tuple(_BASELINES),
    budget: int | None = _MAX_NUM_BATCHED_TOKENS,
) -> None:
    """Add the engine's flags, the baseline and the files.

    ``budget``: the token budget if no flag gives one; None: each engine's own default.
    """
    add_engine_arguments(parser)
    parser.set_defaults(usual_budget=budget)
    shown = "" if budget is None else f"--max-num-batched-tokens {budget} "
    parser.epilog = (
        f"MODEL may also be one of {', '.join(SHAPES)}: that model's config with random weights. "
        "Limits that are not given are, for Kiln and vllm, "
        f"--max-num-seqs {_MAX_NUM_SEQS} {shown}--max-model-len {_MAX_MODEL_LEN}, or what the "
        "requests need."
    )
    bench = parser.add_argument_group("comparison and files")
    bench.add_argument(
        "--baseline",
        choices=("none", *baselines),
        default="none",
        help="then measure this engine in the same way: "
        + "; ".join(_BASELINES[name] for name in baselines),
    )
    bench.add_argument(
        "--baseline-python", metavar="PATH", help="interpreter that has vllm; default: this one"
    )
    add_files(bench)


def add_step_arguments(parser: argparse.ArgumentParser, batch_sizes: tuple[int, ...]) -> None:
    """Add the load of the kinds that time decode steps, with these default batch sizes."""
    load = parser.add_argument_group("load")
    load.add_argument(
        "--batch-sizes",
        type=counts,
        default=batch_sizes,
        metavar="LIST",
        help=f"requests that run together; default {','.join(map(str, batch_sizes))}",
    )
    load.add_argument(
        "--prompt-tokens", type=count, default=128, metavar="N", help="of each; default 128"
    )
    load.add_argument(
        "--output-tokens", type=count, default=128, metavar="N", help="steps timed; default 128"
    )


@contextmanager
def measuring(
    args: argparse.Namespace, together: int, longest: int, least: int | None = None
) -> Iterator[tuple[Subject, str, Tell]]:
    """Yield the model with its settings, the baseline's interpreter, and what shows the progress.

    ``together``: how many requests must run at once. ``longest``: the most tokens of one; a model
    whose context holds only ``least`` will do. Raises ConfigError if a limit is too low for them,
    or if the baseline cannot run.
    """
    from kiln.engine.bench.side_by_side import Subject

    with tempfile.TemporaryDirectory(prefix="kiln-bench-") as parent:
        name, config, _ = subject_of(args, Path(parent))
        config = _with_limits(args, config, together, longest, least)
        python = check_baseline(args, config)
        with measuring_display() as tell:
            yield Subject(name, config), python, tell


def check_baseline(args: argparse.Namespace, config: EngineConfig) -> str:
    """Return the interpreter of the baseline, before Kiln loads. Raises ConfigError."""
    refuse_parallel(args)
    if args.baseline != "vllm":
        if args.baseline_python is not None:
            raise ConfigError("--baseline-python works only with --baseline vllm")
        return sys.executable
    from kiln.engine.bench.vllm_engine import require_vllm

    python = args.baseline_python or sys.executable
    require_vllm(python, config.model.device)
    return python


def refuse_parallel(args: argparse.Namespace) -> None:
    """Raise ConfigError if transformers, which knows one device, is measured beside ranks."""
    if args.baseline == "transformers" and (args.tensor_parallel_size or 1) > 1:
        raise ConfigError(
            f"--tp {args.tensor_parallel_size}: --baseline transformers measures one device: leave "
            "out one of them"
        )


def subject_of(args: argparse.Namespace, parent: Path) -> tuple[str, EngineConfig, ModelFiles]:
    """Return the model's name, the settings and the files.

    A built-in shape is written below ``parent``. Raises ConfigError and ModelError.
    """
    model = model_of(args)
    if model not in SHAPES or Path(model).is_dir():
        if not Path(model).expanduser().exists() and "/" not in model:
            raise ConfigError(
                f"model {model!r}: no such folder, not a hub id such as org/name, and not one "
                f"of the built-in shapes {', '.join(SHAPES)}"
            )
        return served_name(args), *find_model(args)
    if args.load_format == "auto":
        raise ConfigError(
            f"--load-format auto: the built-in shape {model} has no weights to load; leave "
            "the flag out for random ones"
        )
    config, files = located(engine_config(args, write_shape(model, parent)))
    return model, replace(config, model=replace(config.model, load_format="dummy")), files


def finish(
    args: argparse.Namespace,
    subject: Subject,
    measured: Measured,
    load: dict[str, Any],
    markdown: Callable[[Report], str],
    draw: Draw,
) -> int:
    """Print the page, write the files, and return 0. Raises the error that ended the run early."""
    from kiln.engine.bench.report import command_line
    from kiln.engine.bench.side_by_side import make_report

    report = make_report(args.kind, command_line("kiln"), subject, measured, load)
    text = markdown(report)
    write_out(args, report, text, partial(report.write_named, text=text, draw=draw))
    if measured.failure is not None:
        raise measured.failure
    return 0


def write_out(
    args: argparse.Namespace, report: Report, text: str, write: Callable[[Path], list[Path]]
) -> int:
    """Print the page, write the files, and return 0. ``write``: all files, into a folder.

    The page is Markdown; on a terminal its tables are columns that fit.
    """
    from kiln.engine.bench.report import write_json

    print(fit_page(text, screen_width()) if sys.stdout.isatty() else text, flush=True)
    if args.json is not None:
        write_json(args.json, report.to_json())
        say(f"wrote {args.json}")
    if args.output is not None:
        for path in write(args.output):
            say(f"wrote {path}")
    return 0


def _with_limits(
    args: argparse.Namespace, config: EngineConfig, together: int, longest: int, least: int | None
) -> EngineConfig:
    from kiln.engine.models.registry import read_model

    context = config.model.max_model_len
    if context is None:
        model = config.model
        _, read = read_model(Path(model.model), model.quantization, model.overrides)
        context = min(read.max_positions, max(_MAX_MODEL_LEN, longest))
    limits = config.scheduler
    if args.max_num_seqs is None:
        limits = replace(limits, max_num_seqs=max(_MAX_NUM_SEQS, together))
    if args.max_num_batched_tokens is None and args.usual_budget is not None:
        limits = replace(limits, max_num_batched_tokens=args.usual_budget)
    if args.max_waiting is None:  # all requests are submitted at once
        limits = replace(limits, max_waiting=sys.maxsize)
    needed = longest if least is None else least
    if needed > context:
        raise ConfigError(
            f"a request has up to {needed} tokens, prompt and output, and the context is "
            f"{context}: measure shorter ones"
        )
    if together > limits.num_rows:
        raise ConfigError(
            f"--max-num-seqs {limits.max_num_seqs}: {together} requests must run at once"
        )
    return replace(config, model=replace(config.model, max_model_len=context), scheduler=limits)
