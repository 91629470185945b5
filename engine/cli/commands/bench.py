"""Measure Kiln.

``serving``: output tokens per second and latencies over HTTP, with a baseline. ``kernels``: each
kernel's time, its fraction of the roofline, and the same for alternative implementations.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kiln.engine.cli.options import add_engine_arguments, engine_flags, find_model, served_name
from kiln.engine.errors import ConfigError

if TYPE_CHECKING:
    from kiln.engine.bench.report import Report
    from kiln.jit_kernels.declare.spec import KernelSpec

NAME = "bench"
HELP = "benchmark serving over HTTP, or every kernel, against a baseline"
_LOAD = ("num_prompts", "concurrency", "prompt_tokens", "output_tokens")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each benchmark."""
    kinds = parser.add_subparsers(title="kinds", metavar="KIND", dest="kind", required=True)
    _add_kernels(kinds.add_parser("kernels", help="every kernel: time, fraction of the roofline"))
    serving = kinds.add_parser("serving", help="a server under concurrent streams")
    add_engine_arguments(serving)
    load = serving.add_argument_group("load")
    load.add_argument("--url", help="measure this server; default: one of MODEL, on a free port")
    load.add_argument("--num-prompts", type=int, default=128, metavar="N", help="default 128")
    load.add_argument("--concurrency", type=int, default=16, metavar="N", help="default 16")
    load.add_argument(
        "--prompt-tokens", type=int, default=48, metavar="N", help="longest prompt; default 48"
    )
    load.add_argument(
        "--output-tokens", type=int, default=64, metavar="N", help="per answer; default 64"
    )
    load.add_argument(
        "--baseline",
        choices=("none", "transformers"),
        default="none",
        help="also run the same prompts through transformers' generate",
    )
    load.add_argument(
        "--output", type=Path, metavar="FOLDER", help="write JSON, a table and a plot there"
    )


def _add_kernels(kernels: argparse.ArgumentParser) -> None:
    kernels.add_argument(
        "family", nargs="?", metavar="FAMILY", help="such as norm; default: every family"
    )
    kernels.add_argument(
        "--peers", action="store_true", help="also measure other installed libraries"
    )
    kernels.add_argument(
        "--no-compile", action="store_true", help="skip torch.compile, which takes seconds per size"
    )
    kernels.add_argument(
        "--cpu",
        action="store_true",
        help="smoke test, not a benchmark: run this command on a CPU at small sizes",
    )
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    kernels.add_argument(
        "--output", type=Path, metavar="DIR", help="write JSON, a table and rooflines there"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files. Raises KilnError."""
    return _kernels(args) if args.kind == "kernels" else _serving(args)


def _serving(args: argparse.Namespace) -> int:
    from kiln.engine.bench import serving
    from kiln.engine.bench.report import command_line

    for name in _LOAD:
        if getattr(args, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} {getattr(args, name)}: must be 1 or more")
    folder = find_model(args)
    prompts = serving.make_prompts(folder, args.num_prompts, args.prompt_tokens)
    with _server(args) as url:
        _say(f"measuring {url}")
        rows = [serving.measure(url, prompts, args.output_tokens, args.concurrency)]
    if args.baseline == "transformers":
        _say("measuring transformers on the same prompts")
        # Imported here: torch and transformers must not take the server's cores.
        from kiln.engine.bench import baseline, offline

        what = (folder, prompts, args.output_tokens, args.dtype, args.device, args.concurrency)
        rows += baseline.measure(*what)
        if args.url is None:  # else the server still uses the GPU
            rows.append(offline.measure(*what))
    load = {name: getattr(args, name) for name in _LOAD}
    report = serving.make_report(command_line("kiln"), served_name(args), rows, load)
    print(serving.markdown(report))
    _say_written(serving.write(report, args.output) if args.output is not None else ())
    return 0


@contextlib.contextmanager
def _server(args: argparse.Namespace) -> Iterator[str]:
    """Yield the address of the server to measure."""
    from kiln.engine.cli.local_server import local_server

    if args.url is not None:
        yield args.url.rstrip("/").removesuffix("/v1")
        return
    _say("starting a server")
    with local_server(engine_flags(args)) as (url, _):
        yield url


def _kernels(args: argparse.Namespace) -> int:
    import torch
    from rich.console import Console

    from kiln.engine.bench import kernels
    from kiln.engine.bench.report import write_json
    from kiln.jit_kernels.bench.measure import Wanted

    specs = _specs_of(args.family)
    if not args.cpu and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU found, and a kernel's time on a CPU means nothing: run this on a GPU machine, "
            "or add --cpu to smoke-test the benchmark itself"
        )
    wanted = Wanted("cpu" if args.cpu else "cuda", compiled=not args.no_compile, peers=args.peers)
    with Console(stderr=True).status("") as status:
        report = kernels.measure(specs, wanted, status.update)
    _show_kernels(report)
    if args.json is not None:
        write_json(args.json, report.to_json())
    _say_written(kernels.write(report, args.output) if args.output is not None else ())
    wrong = [row for row in report.rows if row["status"].startswith(("wrong result", "failed"))]
    return 1 if any(row["implementation"] in ("jit", "host") for row in wrong) else 0


def _specs_of(family: str | None) -> list[KernelSpec]:
    from kiln.jit_kernels.declare.families import families
    from kiln.jit_kernels.registry import operators

    if family is not None and family not in families():
        known = ", ".join(families())
        raise ConfigError(f"no kernel family is named {family!r}; there are {known}")
    return [spec for spec in operators() if family in (None, spec.family)]


def _show_kernels(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    from kiln.engine.bench import kernels
    from kiln.jit_kernels.bench.table import remarks, side_by_side

    titles, lines = side_by_side(report.rows)
    table = Table(title=kernels.processor(report), title_justify="left")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=number == 0)
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    console.print(
        f"{kernels.roofs(report.details['ceilings'])}. µs: median of rounds; ±: "
        "interquartile range over the median."
    )
    for remark in remarks(report.rows):
        console.print(remark, markup=False, highlight=False)


def _say_written(paths: Iterable[Path]) -> None:
    for path in paths:
        _say(f"wrote {path}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
