"""``kiln bench kernels``: every kernel beside the other ways to run it, under the roofs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kiln.engine.cli.bench_kernel_files import write_files
from kiln.engine.cli.bench_machine import hardware, versions
from kiln.engine.errors import ConfigError
from kiln.jit_kernels.bench import peers
from kiln.jit_kernels.bench.ceilings import measure_ceilings
from kiln.jit_kernels.bench.measure import Wanted, bench_kernel
from kiln.jit_kernels.bench.table import remarks, side_by_side
from kiln.jit_kernels.families import families
from kiln.jit_kernels.registry import operators
from kiln.jit_kernels.spec import KernelSpec

_PACKAGES = ("torch", "triton", "cuda-bindings", "nvidia-cuda-nvrtc")
CPU_REMARK = "CPU SMOKE TEST: these numbers say nothing about a GPU"


def bench_kernels(args: argparse.Namespace) -> int:
    """Measure, print the table, and write the files that were asked for. Raises ConfigError."""
    specs = _specs_of(args.family)
    if not args.cpu and not torch.cuda.is_available():
        raise ConfigError(
            "no GPU here, and a kernel's time on a CPU says nothing: run this where there is one, "
            "or add --cpu to see that the benchmark itself works"
        )
    device = "cpu" if args.cpu else "cuda"
    console = Console(stderr=True)
    with console.status("measuring the machine") as status:
        ceilings = measure_ceilings(device)
        wanted = Wanted(device, compiled=not args.no_compile, peers=args.peers)
        rows: list[dict[str, Any]] = []
        for spec in specs:
            rows += bench_kernel(spec, ceilings, wanted, status.update)
    report: dict[str, Any] = {
        "benchmark": "kernels",
        "device": device,
        "remark": CPU_REMARK if args.cpu else "",
        "ceilings": asdict(ceilings),
        "rows": rows,
        "hardware": hardware(),
        "versions": versions(*_PACKAGES) | (peers.versions() if args.peers else {}),
        "command": shlex.join(["kiln", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    _show(report)
    if args.json is not None:
        _write_json(report, args.json)
    if args.output is not None:
        for path in write_files(report, args.output):
            print(f"wrote {path}", file=sys.stderr)
    wrong = [row for row in rows if row["status"].startswith(("wrong result", "failed"))]
    return 1 if any(row["implementation"] in ("jit", "host") for row in wrong) else 0


def _specs_of(family: str | None) -> list[KernelSpec]:
    specs = operators()
    if family is None:
        return specs
    if family not in families():
        known = ", ".join(families())
        raise ConfigError(f"no kernel family is named {family!r}; there are {known}")
    return [spec for spec in specs if spec.family == family]


def _show(report: dict[str, Any]) -> None:
    rows: Sequence[dict[str, Any]] = report["rows"]
    titles, lines = side_by_side(rows)
    where = report["hardware"]["cpu" if report["device"] == "cpu" else "gpu"]
    table = Table(title=f"{where} {report['remark']}".strip(), title_justify="left")
    for number, title in enumerate(titles):
        table.add_column(title, justify="left" if number < 2 else "right", no_wrap=number == 0)
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    roofs = report["ceilings"]
    console.print(
        f"copy {roofs['copy_bytes_s'] / 1e12:.2f} TB/s, matrix product "
        f"{roofs['matmul_flops_s'] / 1e12:,.1f} TFLOP/s, smallest launch "
        f"{roofs['launch_us']:.2f} µs. µs: median of rounds; ±: middle half of the rounds over it."
    )
    for remark in remarks(rows):
        console.print(remark, markup=False, highlight=False)


def _write_json(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
