#!/usr/bin/env python3
"""Run everything that needs a GPU in one call and write JSON, tables and plots.

From a bare checkout: python3 tools/gpu_check.py --output benchmarks [--bundle FILE]
After a change of some: python3 tools/gpu_check.py --output FOLDER --kernels NAME [NAME ..]
Needs torch, cuda-bindings, NVRTC, Triton and transformers; no server package. Each section runs in
a process of its own, with a time limit, so that none can stop the others: not even one that leaves
the GPU's context broken. What cannot run is written as "not measured" with the reason. Exits 1
when a row fails, 3 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

import torch  # noqa: E402 - after the path, as all below
from gpu import report  # noqa: E402
from gpu.pace import NotMeasured  # noqa: E402

from kiln.jit_kernels.registry import all_specs  # noqa: E402

SECTIONS = {  # name -> module, function, and the seconds after which it is ended
    "kernel_builds": ("gpu.builds", "builds", 60),
    "kernel_loading": ("gpu.loading", "loading", 60),
    "late_load": ("gpu.loading", "late_load", 30),
    "kernel_parity": ("gpu.kernels", "parity", 200),
    "kernel_launch": ("gpu.kernels", "launch_overhead", 60),
    "kernel_timing": ("gpu.kernels", "timing", 200),
    "decode_beside_copy": ("gpu.beside_copy", "decode_beside_copy", 60),
    "against_compile": ("gpu.compiled", "against_compile", 450),
    "host_equals_gpu": ("gpu.agreement", "host_equals_gpu", 90),
    "batch_invariance": ("gpu.invariance", "batch_invariance", 90),
    "sealed_bundle": ("gpu.sealed", "sealed_bundle", 100),
    "greedy_parity": ("gpu.greedy", "parity", 60),
}
# The sections that go kernel by kernel: what --kernels keeps to some of.
_BY_KERNEL = (
    "kernel_builds", "kernel_parity", "kernel_launch", "kernel_timing", "against_compile",
    "host_equals_gpu", "batch_invariance",
)  # fmt: skip
_WHOLE = 900  # seconds of all sections, 780 on an H200; one that finds none left is not measured


def main() -> int:
    """Run the sections that were asked for; return the exit code."""
    parser = _parser()
    args = parser.parse_args()
    if unknown := sorted({*args.kernels} - {*all_specs()}):
        parser.error(f"no kernel is named {', '.join(unknown)}: see kiln kernels list")
    sections = args.only or [name for name in SECTIONS if name in _BY_KERNEL or not args.kernels]
    if whole := sorted({*sections} - {*_BY_KERNEL}) if args.kernels else []:
        parser.error(f"{', '.join(whole)} cannot keep to some kernels: leave --kernels out")
    if args.section:
        return _child(args)
    result: dict[str, Any] = {
        "command": "tools/gpu_check.py " + " ".join(sys.argv[1:]),
        "machine": report.machine(),
        "sections": {},
    }
    args.output.mkdir(parents=True, exist_ok=True)
    path, failed, begun = args.output / "gpu_check.json", False, time.perf_counter()
    for name in sections:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        section = _run(name, args, _WHOLE - (start - begun))
        section["seconds"] = round(time.perf_counter() - start, 1)
        result["sections"][name] = section
        failed |= section["status"] == "failed"
        report.show(name, section)
        # After each section: a machine that is taken away leaves what it measured.
        path.write_text(json.dumps(result, indent=1) + "\n")
    report.write_tables(result, args.output)
    print(f"wrote {path}")
    if not torch.cuda.is_available():
        return 3
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="run these sections")
    parser.add_argument("--quick", action="store_true", help="few sizes, for a first look")
    parser.add_argument("--bundle", type=Path, help="sealed bundle, made elsewhere, to serve from")
    parser.add_argument(
        "--kernels",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these alone, in what goes kernel by kernel",
    )
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def _run(name: str, args: argparse.Namespace, seconds_left: float) -> dict[str, Any]:
    """Run one section in a process; whatever becomes of that, there is a result."""
    if not torch.cuda.is_available():
        return {"status": "not measured", "reason": "no CUDA device", "rows": []}
    if seconds_left < 5:
        reason = f"the {_WHOLE} s of the whole run were used up"
        return {"status": "not measured", "reason": reason, "rows": []}
    limit = min(SECTIONS[name][2], seconds_left)
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "section.json"
        command = [sys.executable, __file__, "--section", name, "--result", str(written)]
        command += ["--quick"] * args.quick
        command += ["--bundle", str(args.bundle)] if args.bundle else []
        command += ["--kernels", *args.kernels] if args.kernels else []
        try:
            done = subprocess.run(command, timeout=limit, check=False)
            ended = f"its process ended with {done.returncode}"
        except subprocess.TimeoutExpired:
            ended = f"not done after {limit:.0f} s"
        if not written.exists():
            return {"status": "failed", "reason": ended, "rows": []}
        section: dict[str, Any] = json.loads(written.read_text())
        if section.get("reason") == "ended before it was done":
            section["reason"] = ended
        return section


def _child(args: argparse.Namespace) -> int:
    """Run one section in this process and write its result to the file that the parent reads."""
    module, function, _ = SECTIONS[args.section]
    section: dict[str, Any]
    try:
        rows = getattr(importlib.import_module(module), function)(args)
        wrong = [row for row in rows if row.get("ok") is False]
        section = {"status": "failed" if wrong else "passed", "rows": rows}
    except NotMeasured as reason:
        section = {"status": "not measured", "reason": str(reason), "rows": []}
    except Exception:
        section = {"status": "failed", "reason": traceback.format_exc(), "rows": []}
    args.result.write_text(json.dumps(section))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
