#!/usr/bin/env python3
"""Run all checks that need a GPU and write JSON, tables and plots.

From a bare checkout: python3 tools/gpu_check.py --output benchmarks [--bundle FILE]
In two calls of less than ten minutes: the same with --part 1/2, then with --part 2/2
On a machine with several GPUs, besides: python3 tools/gpu_check.py --gpus N --output benchmarks
After changing some kernels: python3 tools/gpu_check.py --output FOLDER --kernels NAME [NAME ..]
Needs torch, cuda-bindings, NVRTC, Triton and transformers; no server package. Each section runs in
its own processes with a time limit, so that no section can stop the others, not even by breaking
its CUDA context. Sections that time nothing run at the same time, as far as the memory that each of
them states and the cores allow; then the others run alone. A check that cannot run is written as
"not measured" with the reason. The last part of several joins the reports in --output; --join joins
those that are elsewhere. Exits with 1 if a row fails, with 3 without a GPU.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from argparse import SUPPRESS, ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

import torch  # noqa: E402 - after the path, as all below
from gpu import report  # noqa: E402
from gpu.children import run_all  # noqa: E402
from gpu.pace import NotMeasured, share_of  # noqa: E402
from gpu.parts import Part, join, part_of, split  # noqa: E402
from gpu.room import hold_to, peak  # noqa: E402
from gpu.sections import ALL, BY_KERNEL, SECTIONS, SEVERAL_GPUS  # noqa: E402

from kiln.engine.bench.report import Report, command_line  # noqa: E402
from kiln.jit_kernels.registry import all_specs  # noqa: E402


def main() -> int:
    """Run the requested sections; return the exit code."""
    parser = _parser()
    args = parser.parse_args()
    if unknown := sorted({*args.kernels} - {*all_specs()}):
        parser.error(f"no kernel is named {', '.join(unknown)}: see kiln kernels list")
    if args.section:
        return _child(args)
    if args.join:
        try:
            _write(join(args.join), args.output)
        except (OSError, ValueError) as error:
            parser.error(f"--join: {error}")
        return 0
    if args.gpus < 1:
        parser.error(f"--gpus {args.gpus}: want 1 or more")
    own = SECTIONS if args.gpus == 1 else SEVERAL_GPUS
    if foreign := sorted({*(args.only or ())} - {*own}):
        parser.error(f"--gpus {args.gpus} has no section {', '.join(foreign)}")
    sections = args.only or [name for name in own if name in BY_KERNEL or not args.kernels]
    if whole := sorted({*sections} - {*BY_KERNEL}) if args.kernels else []:
        parser.error(f"{', '.join(whole)} does not support --kernels")
    title = "gpu_check" if args.gpus == 1 else f"gpu_check_{args.gpus}gpus"
    if args.part:
        sections = split(sections, args.part.of)[args.part.number - 1]
    about = {"part": asdict(args.part)} if args.part else {}
    file = args.part.file(title) if args.part else title
    whole, failed = Report(title, command_line("tools/gpu_check.py")), False
    found: dict[str, Any] = {}
    for name, section in run_all(sections, args):
        found[name] = section
        failed |= section["status"] == "failed"
        report.show(name, section)
        # After each section, so that the results survive if the machine is lost.
        in_order = {name: found[name] for name in own if name in found}
        whole = replace(whole, details={**about, "sections": in_order})
        whole.write(args.output, file)
    if args.part:
        _after_part(args.part, title, args.output)
    else:
        _write(whole, args.output)
    if not torch.cuda.is_available():
        return 3
    return 1 if failed else 0


def _after_part(part: Part, title: str, folder: Path) -> None:
    """Join all parts if they are there; else say which are not."""
    files = {each: folder / f"{each.file(title)}.json" for each in part.all()}
    print(f"wrote {files[part]}")
    missing = [f"--part {each}" for each, file in files.items() if not file.exists()]
    if missing:
        print(f"to run, before there is one report in {folder}: {', '.join(missing)}")
        return
    try:
        _write(join([*files.values()]), folder)
    except ValueError as error:
        print(f"the parts in {folder} were not joined: {error}")
        return
    for file in files.values():  # so that no later part is joined with these
        file.unlink()


def _write(whole: Report, folder: Path) -> None:
    for path in report.write(whole, folder):
        print(f"wrote {path}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--only", choices=ALL, action="append", help="run these sections")
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="the sections for N GPUs instead"
    )
    parser.add_argument(
        "--part", type=part_of, metavar="K/N",
        help="run only the K-th of N parts, each of about the same length and less than ten "
        "minutes; with the same other flags for each. When the reports of all parts are in "
        "--output, one report takes their place",
    )  # fmt: skip
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="FILE",
        help="run nothing; join the reports of all parts, gpu_check_part1of2.json and so on, into "
        "one in --output",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="few sizes, for a quick look")
    parser.add_argument("--bundle", type=Path, help="sealed bundle built on another machine")
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=[],
        metavar="NAME",
        help="limit the sections that run kernel by kernel to these",
    )
    # Internal, for child processes: a section, its share of items, whether to only compile.
    parser.add_argument("--section", choices=ALL, help=SUPPRESS)
    parser.add_argument("--share", type=share_of, default=(0, 1), help=SUPPRESS)
    parser.add_argument("--ahead", action="store_true", help=SUPPRESS)
    parser.add_argument("--result", type=Path, help=SUPPRESS)
    return parser


def _child(args: Namespace) -> int:
    """Run one section in this process; write its result to the file that the parent reads."""
    what = ALL[args.section]
    section: dict[str, Any]
    try:
        if what.beside_others and torch.cuda.is_available():
            hold_to(what.gib)
        rows = getattr(importlib.import_module(what.module), what.function)(args)
        wrong = [row for row in rows if row.get("ok") is False]
        section = {"status": "failed" if wrong else "passed", "rows": rows}
    except NotMeasured as reason:
        section = {"status": "not measured", "reason": str(reason), "rows": []}
    except Exception:
        section = {"status": "failed", "reason": traceback.format_exc(), "rows": []}
    with suppress(RuntimeError):  # the section may have broken its CUDA context
        section |= peak()
    args.result.write_text(json.dumps(section))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
