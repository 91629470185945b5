#!/usr/bin/env python3
"""Run everything that needs a GPU in one call and write JSON, tables and plots.

From a bare checkout: python3 tools/gpu_check.py --output benchmarks
Needs torch, cuda-bindings, NVRTC, Triton and transformers; no server package. Sections that
cannot run are written as "not measured" with the reason. Exits 1 when a parity row fails, 3
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tools" / "import_root"), str(ROOT / "tools")]

import torch  # noqa: E402 - after the path, as all below
from gpu import greedy, kernels, loading, report  # noqa: E402

SECTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "kernel_loading": loading.loading,
    "late_load": loading.late_load,
    "kernel_parity": kernels.parity,
    "kernel_launch": kernels.launch_overhead,
    "kernel_timing": kernels.timing,
    "greedy_parity": greedy.parity,
}


def main() -> int:
    """Run the sections that were asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="run these sections")
    parser.add_argument("--quick", action="store_true", help="few sizes, for a first look")
    args = parser.parse_args()
    result: dict[str, Any] = {
        "command": "tools/gpu_check.py " + " ".join(sys.argv[1:]),
        "machine": report.machine(),
        "sections": {},
    }
    failed = False
    for name in args.only or SECTIONS:
        print(f"== {name}", flush=True)
        start = time.perf_counter()
        section = _run(SECTIONS[name], args)
        section["seconds"] = round(time.perf_counter() - start, 1)
        result["sections"][name] = section
        failed |= section["status"] == "failed"
        report.show(name, section)
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / "gpu_check.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    report.write_tables(result, args.output)
    print(f"wrote {path}")
    if not torch.cuda.is_available():
        return 3
    return 1 if failed else 0


def _run(section: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> dict[str, Any]:
    """Run one section; an exception is a failed section, and the others still run."""
    if not torch.cuda.is_available():
        return {"status": "not measured", "reason": "no CUDA device", "rows": []}
    try:
        rows = section(args)
    except Exception:
        return {"status": "failed", "reason": traceback.format_exc(), "rows": []}
    wrong = [row for row in rows if row.get("ok") is False]
    return {"status": "failed" if wrong else "passed", "rows": rows}


if __name__ == "__main__":
    raise SystemExit(main())
